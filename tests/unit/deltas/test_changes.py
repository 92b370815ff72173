"""Changes from one version to the next: the bits afterwards, and what damaged ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightsync.deltas import tiles
from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.tiles import TILE, Code, Tile, coded, difference, expected_nbytes
from weightsync.errors import PlanError, WireError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """Memory of some spans, and versions of it."""

    spans: tuple[Span, ...]
    versions: tuple[Bytes, ...]


NAN_PAYLOADS = np.array([0x7FC1, 0xFFC0, 0x7F81], np.uint16)
ZEROS = np.array([0x0000, 0x8000, 0x0001, 0x8001], np.uint16)
"""Of bf16: 0.0, -0.0 and the smallest denormals."""


def version(rng: np.random.Generator, spans: tuple[Span, ...], before: Bytes, kind: str) -> Bytes:
    """Change `before`, in the elements that `kind` says."""
    after = before.copy()
    for span in spans:
        its = after[span.offset : span.offset + span.nbytes].view(f"<u{span.itemsize}")
        its[changed(rng, kind, len(its))] ^= its.dtype.type(1 + rng.integers(127))
        if kind == "special" and span.itemsize == 2 and len(its):
            its[:] = rng.choice(np.concatenate([NAN_PAYLOADS, ZEROS]), len(its))
    return after


def changed(rng: np.random.Generator, kind: str, num: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(num, bool)
    if not num or kind in ("none", "special"):
        return mask
    if kind == "all":
        mask[:] = True
    elif kind == "ends":
        mask[[0, -1]] = True
    elif kind == "runs":
        for begin in rng.integers(0, num, 4):
            mask[begin : begin + rng.integers(1, 300)] = True
    elif kind == "far":
        mask[:: rng.integers(250, 260)] = True
    else:
        mask = rng.random(num) < float(kind)
    return mask


KINDS = ("none", "all", "ends", "runs", "far", "special", "0.001", "0.02", "0.1", "0.4", "0.95")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spans, at = [], 0
    for itemsize in draw(st.lists(st.sampled_from((1, 2, 4, 8)), max_size=4)):
        at += draw(st.integers(0, 9))  # memory between spans, which may be at any address
        span = Span(at, itemsize * draw(st.sampled_from((0, 1, 2, 7, 8, 9, 255, 700))), itemsize)
        spans.append(span)
        at += span.nbytes
    versions = [rng.integers(0, 256, at + 3, dtype=np.uint8)]
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=3)):
        versions.append(version(rng, tuple(spans), versions[-1], kind))
    return Case(tuple(spans), tuple(versions))


@contextmanager
def in_tiles(most: int) -> Iterator[None]:
    """Run the body with tiles of at most `most` elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE", most)
        yield


MOST = st.sampled_from((1, 64, TILE))


def sent(changes: Changes, spans: tuple[Span, ...]) -> Changes:
    data = np.full(changes.nbytes, 0xAA, np.uint8)
    changes.write(data)
    return Changes.decode(spans, data)


several = settings(max_examples=50)


@several
@given(cases(), MOST)
def test_the_bits_are_those_of_the_version_and_twice_is_as_once(case: Case, most: int) -> None:
    with in_tiles(most):
        check_bits(case)


def check_bits(case: Case) -> None:
    old, new = case.versions[:2]
    changes = sent(Changes.between(case.spans, old, new), case.spans)
    memory = old.copy()
    changes.apply(memory)
    assert (memory == new).all()
    changes.apply(memory)
    assert (memory == new).all()
    assert changes.nbytes <= 9 * len(old) + new.nbytes


@several
@given(cases(), MOST)
def test_a_later_version_may_have_had_some_of_the_changes(case: Case, most: int) -> None:
    """Values are absolute: a delta brings its version also to memory in which others were applied twice."""
    with in_tiles(most):
        steps = [
            sent(Changes.between(case.spans, a, b), case.spans)
            for a, b in zip(case.versions, case.versions[1:], strict=False)
        ]
        memory = case.versions[0].copy()
        for step in (*steps, *steps):
            step.apply(memory)
        assert (memory == case.versions[-1]).all()


@several
@given(cases(), st.data())
def test_damage_is_an_error_or_stays_within_the_spans(case: Case, data: st.DataObject) -> None:
    changes = Changes.between(case.spans, *case.versions[:2])
    wire = np.empty(changes.nbytes, np.uint8)
    changes.write(wire)
    if not len(wire):
        return
    for at in data.draw(st.lists(st.integers(0, len(wire) - 1), min_size=1, max_size=4)):
        wire[at] ^= 1 << data.draw(st.integers(0, 7))
    length = data.draw(st.sampled_from((len(wire), len(wire) - 1, len(wire) // 2)))
    memory = case.versions[0].copy()
    outside = np.ones(len(memory), bool)
    for span in case.spans:
        outside[span.offset : span.offset + span.nbytes] = False
    with suppress(WireError):
        Changes.decode(case.spans, wire[:length]).apply(memory)
    assert (memory[outside] == case.versions[0][outside]).all()


@given(st.sampled_from(KINDS), st.integers(0, 2**32))
@example("far", 7)
def test_the_code_is_the_shortest(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, 5000, dtype=np.uint16)
    new = old ^ changed(rng, "none" if kind == "special" else kind, len(old)).astype(np.uint16)
    found = difference(old, new)
    places = np.flatnonzero(old != new)
    assert found.nbytes == min(coded(places, new[places], len(old)).nbytes, new.nbytes)
    assert found.nbytes <= len(old) / 8 + 1 + 2 * len(places)
    assert found.code == Code.DENSE or (found.places(len(old)) == places).all()


def test_each_code_is_used() -> None:
    rng, num = np.random.default_rng(0), 40_000
    found = {
        kind: difference(np.zeros(num, np.uint16), changed(rng, kind, num).astype(np.uint16))
        for kind in KINDS
    }
    assert {kind: found[kind].code for kind in ("none", "all", "runs", "0.02", "0.4")} == {
        "none": Code.NOTHING,
        "all": Code.DENSE,
        "runs": Code.RUNS,
        "0.02": Code.GAPS,
        "0.4": Code.BITMAP,
    }


DAMAGED = [
    Tile(Code.RUNS, np.array([0, 0, 0], np.uint8), np.zeros(1, np.uint16)),
    Tile(Code.RUNS, np.array([9, 0, 9, 0, 0, 0, 1, 0], "<u1"), np.zeros(3, np.uint16)),
    Tile(Code.RUNS, np.array([0, 0, 255, 255], np.uint8), np.zeros(8, np.uint16)),
    Tile(Code.GAPS, np.array([255, 255], np.uint8), np.zeros(2, np.uint16)),
    Tile(Code.GAPS, np.array([7, 7], np.uint8), np.zeros(2, np.uint16)),
    Tile(Code.BITMAP, np.zeros(9, np.uint8), np.zeros(0, np.uint16)),
    Tile(Code.DENSE, np.zeros(0, np.uint8), np.zeros(7, np.uint16)),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_tile_says_so_and_writes_nothing(damaged: Tile) -> None:
    memory = np.arange(10, dtype=np.uint16)
    with pytest.raises(WireError, match=damaged.code.name):
        damaged.apply(memory)
    assert (memory == np.arange(10)).all()


def test_spans_that_do_not_fit_the_memory_are_refused() -> None:
    one = Span(0, 4, 2)
    memory = np.zeros(4, np.uint8)
    with pytest.raises(PlanError, match="does not fit"):
        Changes.between((replace(one, nbytes=6),), memory, memory)


def test_a_sent_tile_is_of_no_other_memory() -> None:
    data: Any = np.empty(Changes.between((Span(0, 4, 2),), *np.eye(2, 4, dtype=np.uint8)).nbytes, np.uint8)
    Changes.between((Span(0, 4, 2),), *np.eye(2, 4, dtype=np.uint8)).write(data)
    with pytest.raises(WireError, match=r"too short|has \d+ bytes"):
        Changes.decode((Span(0, 4, 2), Span(4, 4, 2)), data)
    with pytest.raises(WireError, match="has 4 bytes, not the 0"):
        Changes.decode((), data[:4])
    data[0] = 9
    with pytest.raises(WireError, match="code 9, of 0 to 4"):
        Changes.decode((Span(0, 4, 2),), data)


@pytest.mark.parametrize("density", [0.0, 1e-5, 0.001, 0.02, 0.1, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_the_expected_bytes_are_those_of_random_changes(density: float, itemsize: int) -> None:
    num = 4 * TILE
    mask = np.random.default_rng(0).random(num) < density
    new: Any = mask.astype(f"u{itemsize}")
    found = Changes.between(
        (Span(0, num * itemsize, itemsize),), np.zeros(num * itemsize, np.uint8), new.view(np.uint8)
    )
    assert expected_nbytes(num, itemsize, density) == pytest.approx(found.nbytes, rel=0.05, abs=200)
