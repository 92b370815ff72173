"""Boxes against numpy: a box is the set of indices that its slices pick."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.plan import Box, TensorMeta

SHAPE = (5, 4, 6)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offset = tuple(draw(st.integers(0, size)) for size in SHAPE)
    extent = tuple(draw(st.integers(0, size - at)) for size, at in zip(SHAPE, offset, strict=True))
    return Box(offset, extent)


def painted(box: Box) -> np.ndarray:
    grid = np.zeros(SHAPE, np.bool_)
    grid[box.slices()] = True
    return grid


@given(boxes(), boxes())
def test_intersection_is_what_both_hold(one: Box, other: Box) -> None:
    both = painted(one) & painted(other)
    common = one.intersect(other)
    assert (common is None) == (not both.any())
    if common is not None:
        np.testing.assert_array_equal(painted(common), both)
    assert one.contains(other) == (painted(other) <= painted(one)).all()


@given(boxes(), st.integers(1, 130))
def test_split_walks_the_box_in_row_major_order(box: Box, max_numel: int) -> None:
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    parts = list(box.split(max_numel))
    assert all(0 < part.numel <= max_numel for part in parts)
    walked = [numbers[part.slices()].ravel() for part in parts]
    np.testing.assert_array_equal(np.concatenate([[], *walked]), numbers[box.slices()].ravel())


def test_split_takes_as_many_rows_as_fit() -> None:
    assert [part.extent for part in Box((2, 0), (5, 3)).split(7)] == [(2, 3), (2, 3), (1, 3)]
    assert [part.extent for part in Box((0, 0), (2, 5)).split(3)] == [(1, 3), (1, 2)] * 2


def test_slices_relative_to_an_origin() -> None:
    assert Box((4, 2), (2, 3)).slices(Box((3, 2), (9, 9))) == (slice(1, 3), slice(0, 3))


def test_a_scalar_is_a_box_of_one_element() -> None:
    box = Box((), ())
    assert (box.ndim, box.numel, box.end, box.slices()) == (0, 1, (), ())
    assert box.intersect(box) == box
    assert list(box.split(1)) == [box]


def test_boxes_and_metas_survive_pickling() -> None:
    for value in (Box((1, 2), (3, 4)), TensorMeta("w", "bfloat16", (3, 4))):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_tensor_measures_itself() -> None:
    meta = TensorMeta("w", "bfloat16", (3, 4))
    assert (meta.itemsize, meta.numel, meta.nbytes) == (2, 12, 24)
    assert TensorMeta("s", "float64", ()).nbytes == 8


def test_unknown_dtype_names_the_tensor_and_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"model\.w: unknown dtype 'bfloat61'; did you mean 'bfloat16'"):
        TensorMeta("model.w", "bfloat61", (1,))
    with pytest.raises(PlanError, match="negative"):
        TensorMeta("model.w", "int8", (2, -1))
