"""Many boxes at once, and copies that join: the same bytes to the same places, in fewer copies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan.layout.copies import box_copies, join


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
    single = [
        (box[:3], 2, at * 1000, _strides(box[:3], box[3], 2), at * 1000, _strides(box[:3], box[4], 2))
        for at, box in enumerate(boxes)
    ]
    table, parent = box_copies(single)
    alone = [box_copies([box])[0].tolist() for box in single]
    assert [table[parent == number].tolist() for number in range(len(boxes))] == alone


def test_boxes_of_different_dimensions_and_empty_ones_are_copied_together() -> None:
    boxes = [
        ((0, 5), 2, 0, (10, 2), 0, (10, 2)),
        ((), 4, 100, (), 200, ()),
        ((2, 3), 1, 300, (8, 1), 400, (3, 1)),
    ]
    table, parent = box_copies(boxes)
    assert table.tolist() == [[100, 200, 1, 4, 4, 4], [300, 400, 2, 3, 8, 3]]
    assert parent.tolist() == [1, 2]


def _strides(extent: tuple[int, ...], order: tuple[int, ...], itemsize: int) -> list[int]:
    strides, stride = [0, 0, 0], itemsize
    for axis in order:
        strides[axis] = stride
        stride *= extent[axis] + axis % 2
    return strides
