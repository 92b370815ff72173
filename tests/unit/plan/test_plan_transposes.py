"""Transposed copies: found in any table, and cut into tiles that write each byte once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, Layout, RankLayout, Reshard, Segment, TensorMeta
from weightsync.plan.layout.copies import ITEMSIZES, MIN_SIDE, BoxCopy, Copies, Copy, box_copies
from weightsync.plan.layout.transposes import Transposes

LENGTHS = st.sampled_from([1, 2, MIN_SIDE - 1, MIN_SIDE, MIN_SIDE + 1, 64, 70])
SIDES = st.sampled_from([16, 64, 128])


def addresses(copies: Copies) -> tuple[np.ndarray, np.ndarray]:
    """Return the source's and the target's address of each byte that is copied."""
    moved = [
        (start[:, None] + np.arange(row_nbytes))
        for src, dst, rows, row_nbytes, src_pitch, dst_pitch in copies.table().tolist()
        for start in (src + np.arange(rows) * src_pitch, dst + np.arange(rows) * dst_pitch)
    ]
    return _flat(moved[::2]), _flat(moved[1::2])


def transposed_addresses(tiles: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what `addresses` does, for transposed tiles."""
    sources, targets = [], []
    for src, dst, rows, row_nbytes, src_pitch, dst_pitch in tiles.tolist():
        row, column, byte = np.ogrid[:rows, : row_nbytes // itemsize, :itemsize]
        sources.append(src + row * src_pitch + column * itemsize + byte)
        targets.append(dst + column * dst_pitch + row * itemsize + byte)
    return _flat(sources), _flat(targets)


def _flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(part.ravel() for part in parts)])


def check(copies: Copies, bounds: Sequence[int], side: int) -> Transposes:
    """Prove that matrices and other copies move the same bytes as `copies`, in the same groups."""
    found = Transposes.find(copies, bounds)
    for low, high in itertools.pairwise(bounds):
        group = np.arange(low, high)
        others = found.others[(low <= found.others) & (found.others < high)]
        parts = [addresses(Copies(*copies.table(others).T))]
        for itemsize in ITEMSIZES:
            tiles, first = found.tiles(itemsize, side)
            assert (np.diff(first) >= 0).all()
            tiles = tiles[(low <= first) & (first < high)]
            assert (tiles[:, 2:4] > 0).all()
            assert (tiles[:, 2:4] <= [side, side * itemsize]).all()
            assert not (tiles[:, [0, 1, 3, 4, 5]] % itemsize).any()
            parts.append(transposed_addresses(tiles, itemsize))
        moved = [np.concatenate(each) for each in zip(*parts, strict=True)]
        given_ = addresses(Copies(*copies.table(group).T))
        assert _sorted(*moved) == _sorted(*given_)
    return found


def _sorted(src: np.ndarray, dst: np.ndarray) -> list[tuple[int, int]]:
    order = np.lexsort((src, dst))
    return list(zip(src[order].tolist(), dst[order].tolist(), strict=True))


@st.composite
def strided(draw: st.DrawFn, extent: tuple[int, ...], itemsize: int) -> tuple[int, list[int], int]:
    """(first byte, strides in bytes, end) of a box in memory, with its dimensions in any order."""
    strides, stride = [0] * len(extent), itemsize
    for axis in draw(st.permutations(range(len(extent)))):
        strides[axis] = stride
        stride *= extent[axis] + draw(st.sampled_from([0, 0, 1, 3]))
    start = draw(st.integers(0, 8)) * draw(st.sampled_from([1, itemsize, itemsize]))
    return start, strides, start + stride


@st.composite
def boxes(draw: st.DrawFn) -> list[BoxCopy]:
    """Boxes whose targets follow each other."""
    made: list[BoxCopy] = []
    at = 0
    for _ in range(draw(st.integers(0, 4))):
        extent = (draw(LENGTHS), draw(LENGTHS), *draw(st.lists(st.integers(1, 3), max_size=1)))
        itemsize = draw(st.sampled_from([*ITEMSIZES, 3, 16]))
        src, src_strides, _ = draw(strided(extent, itemsize))
        dst, dst_strides, nbytes = draw(strided(extent, itemsize))
        made.append((extent, itemsize, src, src_strides, at + dst, dst_strides))
        at += nbytes
    return made


@given(boxes(), SIDES, st.data())
def test_any_boxes_are_copied_once_in_their_groups(
    made: list[BoxCopy], side: int, data: st.DataObject
) -> None:
    table, _ = box_copies(made)
    cuts = data.draw(st.lists(st.integers(0, len(table)), max_size=3))
    bounds = [0, *sorted(cuts), len(table)]
    found = check(Copies(*table.T), bounds, side)
    for first, rows in zip(found.first.tolist(), found.table.tolist(), strict=True):
        assert not any(first < bound < first + min(rows[2], MIN_SIDE - 1) for bound in bounds)


@given(
    st.lists(
        st.tuples(st.integers(1, 80), st.sampled_from([0, 2, 3, 6]), st.sampled_from([200, 202, 400])),
        max_size=6,
    ),
    st.booleans(),
    SIDES,
)
def test_columns_in_any_steps_are_copied_once(
    runs: list[tuple[int, int, int]], written: bool, side: int
) -> None:
    """Columns of 33 elements; their steps change, also where nothing else does."""
    rows: list[Copy] = []
    element, other = 10_000, 0
    for count, gap, step in runs:
        element += gap
        for _ in range(count):
            starts = (element, other) if written else (other, element)
            rows.append((*starts, 33, 2, *((1000, 2) if written else (2, 1000))))
            element, other = element + 2, other + step
    check(Copies.of(rows), [0, len(rows)], side)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("shape", [(3, 200, 96), (3, 96, 200), (300, 70, 64)])
def test_a_stack_of_transposed_matrices_is_found_whole(shape: tuple[int, int, int], itemsize: int) -> None:
    count, inputs, outputs = shape
    nbytes = inputs * outputs * itemsize
    src_strides = (nbytes, itemsize, outputs * itemsize)
    dst_strides = (nbytes, inputs * itemsize, itemsize)
    extent = (count, outputs, inputs)
    table, _ = box_copies([(extent, itemsize, 0, src_strides, 1 << 40, dst_strides)])
    found = Transposes.find(Copies(*table.T), [0, len(table)])
    assert not len(found.others)
    each = [[inputs, outputs * itemsize, outputs * itemsize, inputs * itemsize]] * count
    assert found.table[:, 2:].tolist() == each
    assert found.table[:, 0].tolist() == [number * nbytes for number in range(count)]
    assert found.itemsize.tolist() == [itemsize] * count
    tiles, _ = found.tiles(itemsize, 64)
    assert len(tiles) == count * -(-inputs // 64) * -(-outputs // 64)


def test_a_copy_between_two_matrices_belongs_to_the_first_one() -> None:
    steps = [100] * 40 + [300] * 40
    targets = np.cumsum([0, *steps])
    rows: list[Copy] = [(2 * i, dst, 40, 2, 1000, 2) for i, dst in enumerate(targets.tolist())]
    found = check(Copies.of(rows), [0, len(rows)], 64)
    assert (found.first.tolist(), found.table[:, 3].tolist()) == ([0, 41], [82, 80])
    assert not len(found.others)


def test_few_columns_and_unaligned_elements_are_left_as_they_are() -> None:
    few: list[Copy] = [(2 * i, 5000 + 80 * i, 40, 2, 1000, 2) for i in range(MIN_SIDE - 1)]
    low: list[Copy] = [(2 * i, 5000 + 40 * i, MIN_SIDE - 1, 2, 1000, 2) for i in range(100)]
    odd: list[Copy] = [(2 * i + 1, 5000 + 80 * i, 40, 2, 1000, 2) for i in range(100)]
    for rows in (few, low, odd):
        found = Transposes.find(Copies.of(rows), [0, len(rows)])
        assert (len(found.first), found.others.tolist()) == (0, list(range(len(rows))))


@pytest.mark.parametrize(("count", "inputs", "outputs"), [(8, 256, 96), (8, 96, 256), (160, 40, 64)])
def test_direct_reads_of_transposed_experts_are_found(count: int, inputs: int, outputs: int) -> None:
    """Two trainers have the halves of all experts, input-major; the engine's are output-major."""
    tensors = tuple(TensorMeta(name, "bfloat16", (count, outputs, inputs)) for name in ("up", "down"))
    nbytes, half = inputs * outputs * 2, count // 2
    trainers = []
    for rank in range(2):
        box = Box((half * rank, 0, 0), (half, outputs, inputs))
        held = (Segment(each.name, box, each.name, 0, (nbytes, 2, 2 * outputs)) for each in tensors)
        trainers.append(RankLayout(tensors, tuple(held)))
    taken = (
        Segment(each.name, Box.whole(each.shape), each.name, 0, (nbytes, 2 * inputs, 2)) for each in tensors
    )
    engine = Layout.from_ranks([RankLayout(tensors, tuple(taken))])
    reads = Reshard(Layout.from_ranks(trainers), "e0", engine).reads(0, [1, 1])
    src = {(rank, name): (1 + rank) << 40 for rank in range(2) for name in ("up", "down")}
    found = check(reads.copies(src, {"up": 1 << 50, "down": 1 << 51}), [0, len(reads)], 128)
    assert not len(found.others)
    assert len(found.first) == 2 * count
