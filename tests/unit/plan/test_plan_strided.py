"""Many boxes at once, and copies that join: the same bytes to the same places, in fewer copies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan.copies import box_copies, join, strided_copies


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 3)), max_size=40))
def test_joining_keeps_each_byte(pieces: list[tuple[int, int, int]]) -> None:
    """Copies written one after the other, read from anywhere, between 3 pairs of memories."""
    at, rows = [0, 0, 0], []
    for lane, src, nbytes in pieces:
        rows.append((lane, src, at[lane], 1, nbytes, nbytes, nbytes))
        at[lane] += nbytes + src % 3
    given_ = np.array(rows, np.int64).reshape(-1, 7)
    lane, table = join(given_[:, 0], given_[:, 1:])
    assert moved(lane, table) == moved(given_[:, 0], given_[:, 1:])
    assert len(table) <= len(given_)


def moved(lane: np.ndarray, table: np.ndarray) -> Counter[tuple[int, int, int]]:
    return Counter(
        (number, src + row * src_pitch + byte, dst + row * dst_pitch + byte)
        for number, (src, dst, rows, nbytes, src_pitch, dst_pitch) in zip(
            lane.tolist(), table.tolist(), strict=True
        )
        for row in range(rows)
        for byte in range(nbytes)
    )


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(1, 4), st.sampled_from([0, 0, 7]), st.sampled_from([40, 50])
        ),
        max_size=8,
    )
)
def test_joining_columns_keeps_each_byte(pieces: list[tuple[int, int, int, int]]) -> None:
    """Columns of one matrix, some of them less high, some from elsewhere."""
    at, rows = 0, []
    for width, height, shift, src_pitch in pieces:
        rows.append((at + shift, at, height, width, src_pitch, 40))
        at += width
    table = np.array(rows, np.int64).reshape(-1, 6)
    lane, joined = join(np.zeros(len(table), np.int64), table)
    assert moved(lane, joined) == moved(np.zeros(len(table), np.int64), table)


def evenly_wide(gaps: list[int]) -> np.ndarray:
    """Rows of 4 bytes, so far apart."""
    dst = np.cumsum([0, *gaps])
    return np.stack([dst * 10, dst, *np.broadcast_to([1, 4, 4, 4], (len(dst), 4)).T], axis=1)


@given(st.lists(st.sampled_from([5, 9]), max_size=24))
def test_joining_rows_keeps_each_byte(gaps: list[int]) -> None:
    table = evenly_wide(gaps)
    lane, joined = join(np.zeros(len(table), np.int64), table)
    assert moved(lane, joined) == moved(np.zeros(len(table), np.int64), table)


@pytest.mark.parametrize(
    ("gaps", "num_copies"), [([5] * 11, 1), ([5, 9] * 5 + [5], 6), ([5] * 5 + [9] * 6, 2), ([], 1)]
)
def test_rows_that_are_equally_far_apart_are_one_copy(gaps: list[int], num_copies: int) -> None:
    table = evenly_wide(gaps)
    assert len(join(np.zeros(len(table), np.int64), table)[1]) == num_copies


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3, st.permutations(range(3)), st.permutations(range(3)))))
def test_many_boxes_are_what_each_of_them_is(boxes: list[tuple]) -> None:
    extent = np.array([box[:3] for box in boxes], np.int64).reshape(-1, 3)
    strides = [
        np.array([_strides(box[:3], box[3 + side], 2) for box in boxes], np.int64).reshape(-1, 3)
        for side in range(2)
    ]
    start = np.arange(len(boxes)) * 1000
    two = np.full(len(boxes), 2)
    table, parent = strided_copies(extent, two, start, strides[0], start, strides[1])
    single = [
        moved_of(box_copies(e, 2, at, s, at, d))
        for e, at, s, d in zip(
            extent.tolist(), start.tolist(), strides[0].tolist(), strides[1].tolist(), strict=True
        )
    ]
    assert [moved_of(table[parent == number].tolist()) for number in range(len(boxes))] == single
    fewest = [len(box_copies(e, 2, 0, s, 0, d)) for e, s, d in zip(extent.tolist(), *strides, strict=True)]
    assert np.bincount(parent, minlength=len(boxes)).tolist() == fewest


def moved_of(rows: list) -> Counter[tuple[int, int, int]]:
    table = np.array(rows, np.int64).reshape(-1, 6)
    return moved(np.zeros(len(table), np.int64), table)


def _strides(extent: tuple[int, ...], order: tuple[int, ...], itemsize: int) -> list[int]:
    strides, stride = [0, 0, 0], itemsize
    for axis in order:
        strides[axis] = stride
        stride *= extent[axis] + axis % 2
    return strides
