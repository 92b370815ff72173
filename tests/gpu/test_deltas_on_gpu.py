"""A GPU makes the same deltas as the CPU, byte for byte, and applies deltas alike, also in a fleet."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.test_deltas import NUM_ELEMENTS, Apart, drive_apart
from tests.unit.deltas.test_changes import DAMAGED, KINDS, Case, cases
from tests.unit.deltas.test_device_changes import CHUNK_NBYTES, check_bytes, data_of, large, refuses
from weightsync.deltas.changes import Changes
from weightsync.deltas.device_changes import CodingMemory, DeviceCoder
from weightsync.deltas.tiles import Tile
from weightsync.errors import WireError
from weightsync.holder import part_deltas
from weightsync.holder.snapshots import SnapshotStore
from weightsync.plan import Plan

pytestmark = pytest.mark.gpu

several = settings(max_examples=400, deadline=None)


@pytest.fixture(scope="module")
def memory() -> CodingMemory:
    return CodingMemory(CHUNK_NBYTES)


@several
@given(case=cases())
def test_the_bytes_are_those_of_the_cpu_and_twice_is_as_once(case: Case, memory: CodingMemory) -> None:
    check_bytes(case, memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_bytes_of_many_tiles_are_those_of_the_cpu(width: int, kind: str, memory: CodingMemory) -> None:
    check_bytes(large(width, kind), memory)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_tile_says_so_and_writes_nothing(damaged: Tile, memory: CodingMemory) -> None:
    refuses(damaged, memory)


@several
@given(case=cases(), data=st.data())
def test_damage_is_an_error_or_stays_within_the_spans(
    case: Case, data: st.DataObject, memory: CodingMemory
) -> None:
    base = torch.from_numpy(case.versions[0])
    sent = data_of(Changes.between(case.spans, *case.versions[:2]))
    for at in data.draw(st.lists(st.integers(0, max(len(sent) - 1, 0)), max_size=4)) if len(sent) else ():
        sent[at] ^= 1 << data.draw(st.integers(0, 7))
    guarded = np.full(len(base) + 4096, 0xA5, np.uint8)
    to = torch.from_numpy(guarded)[2048 : 2048 + len(base)].copy_(base)
    with suppress(WireError):
        DeviceCoder(case.spans, memory).rebuild(torch.from_numpy(sent), base, to)
    outside = np.ones(len(base), bool)
    for span in case.spans:
        outside[span.offset : span.offset + span.nbytes] = False
    assert (to.numpy()[outside] == case.versions[0][outside]).all()
    assert (guarded[:2048] == 0xA5).all()
    assert (guarded[2048 + len(base) :] == 0xA5).all()


def test_holders_make_and_use_deltas_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders whose snapshots are in memory of the host, page-locked, on hosts of their own."""
    coders: list[DeviceCoder] = []

    class Coder(DeviceCoder):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            coders.append(self)

    def deltas(plan: Plan, store: SnapshotStore, _: bool) -> part_deltas.PartDeltas:
        return part_deltas.PartDeltas(plan, store, on_device=True)

    monkeypatch.setattr(part_deltas, "DeviceCoder", Coder)
    monkeypatch.setattr("weightsync.holder.staged_parts.PartDeltas", deltas)

    async def work(loop: Apart) -> None:
        await loop.controller.connect()
        for version in range(1, 6):
            loop.nudge()
            report = await loop.controller.update(version)
            assert report.verified
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds()
            few = version > 1
            assert report.ways == {"holder 0": "mapped, delta" if few else "mapped"}
            assert (report.bytes_from["holder 0"] < 4 * NUM_ELEMENTS) == few
        loop.engines["e1"].tensors["0.weight"].zero_()
        assert (await loop.controller.refill("e1")).engines == {"e0": 5, "e1": 5}
        assert loop.holds()

    drive_apart(work)
    assert len(coders) == 3, "of the trainer's holder, and of the engines'"
