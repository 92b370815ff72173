"""Runs of a flattened tensor, as boxes: the same elements, in few boxes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Segment, TensorMeta
from weightsync.plan.layout.runs import run_boxes, run_segments

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(runs())
def test_boxes_hold_the_elements_of_the_run_in_order(made: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = made
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(run_boxes(shape, start, stop))
    found = [number for box in boxes for number in numbers[box.slices()].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(runs())
def test_segments_view_the_run_in_its_memory(made: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = made
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    memory = numbers.reshape(-1)[start:stop].copy()

    def view(segment: Segment) -> np.ndarray:
        base = memory[segment.byte_offset // 4 :]
        return np.lib.stride_tricks.as_strided(base, segment.box.extent, segment.strides)

    for segment in run_segments(TensorMeta("w", "int32", shape), start, stop, "part"):
        assert segment.buffer == "part"
        assert (view(segment) == numbers[segment.box.slices()]).all()


def test_uneven_parts_of_all_ranks_hold_each_element_once() -> None:
    shape, num_ranks = (103, 32), 3
    nth = -(-103 * 32 // num_ranks)
    held = np.zeros(shape, np.int64)
    for rank in range(num_ranks):
        for box in run_boxes(shape, rank * nth, min(rank * nth + nth, held.size)):
            held[box.slices()] += 1
    assert (held == 1).all()


def test_an_empty_run_has_no_box() -> None:
    assert list(run_boxes((4, 4), 5, 5)) == []
    assert list(run_boxes((0, 4), 0, 0)) == []
    assert list(run_boxes((), 1, 1)) == []
