"""`DeviceCoder` makes the same deltas as `Changes`, chunk by chunk, with doubles of the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernel_doubles import use_change_doubles
from tests.unit.deltas.test_changes import DAMAGED, KINDS, Case, version
from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.device_changes import CodingMemory, DeviceCoder
from weightsync.deltas.tiles import TILE, Bytes, Tile
from weightsync.errors import WireError

CHUNK_NBYTES = 1 << 20


def check_bytes(case: Case, memory: CodingMemory) -> None:
    """Compare with `Changes`. Apply the delta to the base version, and again to the result."""
    old, new = (torch.from_numpy(each) for each in case.versions[:2])
    sent = data_of(Changes.between(case.spans, old.numpy(), new.numpy()))
    coder, saved = DeviceCoder(case.spans, memory), old.clone()
    found = coder.between(old, new, saved)
    assert torch.equal(saved, new)
    data = np.full(found.nbytes, 0xAA, np.uint8)
    found.write(data)
    assert data.tobytes() == sent.tobytes()
    for base in (old, new):
        to = base.clone()
        coder.rebuild(torch.from_numpy(data), base, to)
        assert torch.equal(to, new)


def data_of(changes: Changes) -> Bytes:
    data = np.empty(changes.nbytes, np.uint8)
    changes.write(data)
    return data


def large(width: int, kind: str) -> Case:
    """Return versions of several chunks: whole tiles, parts of tiles, and spans without elements."""
    spans, at = [], 0
    for numel in (3 * TILE + 7, 0, 5, TILE, 2 * TILE, 9 * CHUNK_NBYTES // 8 // width):
        spans.append(Span(at, numel * width, width))
        at += -(-numel * width // 16) * 16
    rng = np.random.default_rng(width)
    old = rng.integers(0, 256, at + 3, dtype=np.uint8)
    return Case(tuple(spans), (old, version(rng, tuple(spans), old, kind)))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CodingMemory:
    use_change_doubles(monkeypatch)
    return CodingMemory(CHUNK_NBYTES)


@pytest.mark.parametrize(("width", "kind"), [(1, "0.02"), (2, "far"), (2, "none"), (4, "0.4"), (8, "runs")])
def test_chunks_have_the_bytes_of_the_whole(width: int, kind: str, memory: CodingMemory) -> None:
    assert kind in KINDS
    check_bytes(large(width, kind), memory)


def test_without_tiles_there_is_nothing(memory: CodingMemory) -> None:
    check_bytes(Case((Span(0, 0, 2),), (np.zeros(3, np.uint8),) * 2), memory)


def refuses(damaged: Tile, memory: CodingMemory) -> None:
    """A damaged tile is named, and nothing is written."""
    spans, base = (Span(0, 20, 2),), torch.arange(20, dtype=torch.uint8)
    to = base.clone()
    with pytest.raises(WireError, match=damaged.code.name):
        DeviceCoder(spans, memory).rebuild(torch.from_numpy(data_of(Changes(spans, [damaged]))), base, to)
    assert torch.equal(to, base)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_tile_says_so_and_writes_nothing(damaged: Tile, memory: CodingMemory) -> None:
    refuses(damaged, memory)


def test_more_values_than_elements_are_refused_before_they_are_copied(memory: CodingMemory) -> None:
    refuses(Tile(DAMAGED[0].code, np.zeros(4, np.uint8), np.zeros(11, np.uint16)), memory)
