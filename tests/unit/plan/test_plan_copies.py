"""2-D copies: executed on plain bytes they move exactly the box, as few rows and tiles as promised."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan.layout.copies import Copies, box_copies, tiles

Bytes = npt.NDArray[np.uint8]
POISON = 0xA5


def execute(rows: Iterable[Iterable[int]], source: Bytes, target: Bytes) -> None:
    for src, dst, num_rows, row_nbytes, src_pitch, dst_pitch in rows:
        for row in range(num_rows):
            at, to = src + row * src_pitch, dst + row * dst_pitch
            assert at >= 0
            assert to >= 0
            assert at + row_nbytes <= len(source)
            assert to + row_nbytes <= len(target)
            assert (target[to : to + row_nbytes] == POISON).all(), "written twice"
            target[to : to + row_nbytes] = source[at : at + row_nbytes]


@st.composite
def memories(draw: st.DrawFn, extent: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...], int]:
    """(first byte, strides in bytes, size of the memory) of a box cut out of a larger tensor."""
    order = draw(st.permutations(range(len(extent))))
    strides = [0] * len(extent)
    stride = itemsize
    for axis in order:
        strides[axis] = stride
        stride *= extent[axis] + draw(st.sampled_from([0, 0, 1, 3]))
    start = draw(st.integers(0, 5)) * itemsize
    return start, tuple(strides), start + stride + itemsize


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    extent = draw(st.lists(st.integers(0, 6) | st.just(1), max_size=4))
    return tuple(extent), draw(st.sampled_from([1, 2, 4, 8]))


def as_box(memory: Bytes, start: int, strides: tuple[int, ...], extent: tuple[int, ...], size: int) -> Bytes:
    return np.lib.stride_tricks.as_strided(memory[start:], (*extent, size), (*strides, 1))


@given(st.data())
def test_executed_they_are_numpys_assignment(data: st.DataObject) -> None:
    extent, itemsize = data.draw(boxes())
    src, src_strides, src_size = data.draw(memories(extent, itemsize))
    dst, dst_strides, dst_size = data.draw(memories(extent, itemsize))
    source = np.random.default_rng(0).integers(0, POISON, src_size, dtype=np.uint8)
    expected = np.full(dst_size, POISON, np.uint8)
    box = as_box(source, src, src_strides, extent, itemsize)
    as_box(expected, dst, dst_strides, extent, itemsize)[...] = box

    copies = Copies(*box_copies([(extent, itemsize, src, src_strides, dst, dst_strides)])[0].T)
    assert int((copies.rows * copies.row_nbytes).sum()) == math.prod(extent) * itemsize
    max_nbytes = data.draw(st.sampled_from([128, 256, 1024]))
    for rows in (copies.table(), tiles(copies, max_nbytes)[0]):
        target = np.full(dst_size, POISON, np.uint8)
        execute(rows.tolist(), source, target)
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(
    ("extent", "src_strides", "dst_strides", "num_copies", "row_nbytes"),
    [
        ((64, 32), (64, 2), (64, 2), 1, 4096),  # a block of whole rows
        ((64, 32), (4096, 2), (64, 2), 1, 64),  # some columns of each row
        ((8, 64, 32), (8192, 128, 2), (4096, 64, 2), 1, 64),  # some columns of each of 8 matrices
        ((8, 64, 32), (9000, 128, 2), (4096, 64, 2), 8, 64),  # and only some of their rows
        ((8, 64, 32), (8192, 64, 2), (4096, 64, 2), 1, 4096),  # some rows of each of 8 matrices
        ((8, 1, 32), (64, 9999, 2), (64, 7, 2), 1, 512),  # a size of 1 has no stride
        ((32, 64), (2, 64), (2, 64), 1, 4096),  # transposed on both sides
        ((), (), (), 1, 2),
        ((0, 5), (10, 2), (10, 2), 0, None),
    ],
)
def test_few_copies(extent, src_strides, dst_strides, num_copies, row_nbytes) -> None:
    copies = box_copies([(extent, 2, 1000, src_strides, 2000, dst_strides)])[0].tolist()
    assert len(copies) == num_copies
    assert {copy[3] for copy in copies} == ({row_nbytes} if num_copies else set())


def test_the_longest_dimension_becomes_the_rows() -> None:
    copies, _ = box_copies([((3, 100, 8), 1, 0, (10_000, 64, 1), 0, (800, 8, 1))])
    assert copies.tolist() == [[i * 10_000, i * 800, 100, 8, 64, 8] for i in range(3)]


def test_nothing_to_copy() -> None:
    nothing = Copies.of([])
    assert (len(nothing), tiles(nothing, 128)[0].shape) == (0, (0, 6))
