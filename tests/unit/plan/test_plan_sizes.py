"""Sizes of every kind: a plan counts them exactly, or a PlanError names the tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan

DIMS = st.one_of(st.integers(0, 70), st.integers(0, 70).map(lambda n: 1 << n), st.integers(0, 1 << 70))
NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(-70, 70).map(lambda n: (1 << abs(n)) * (-1 if n < 0 else 1))
)
MOST = 1 << 52
MEMBERS = Members(2, (0,), (("e", (1,)),))


def whole(meta: TensorMeta) -> RankLayout:
    strides, step = [], meta.itemsize
    for size in reversed(meta.shape):
        strides.append(step)
        step *= max(size, 1)
    box = Box((0,) * len(meta.shape), meta.shape)
    return RankLayout(
        (meta,), (Segment(meta.name, box, meta.name, 0, tuple(reversed(strides))),), (), (meta,)
    )


def plan(*metas: TensorMeta) -> Plan:
    ranks = [whole(meta) for meta in metas]
    tensors, segments = tuple(metas), tuple(each for rank in ranks for each in rank.segments)
    side = Layout.from_ranks([RankLayout(tensors, segments, (), tensors)])
    return make_plan(side, {"e": side}, MEMBERS, bucket_bytes=1 << 56, max_staging_bytes=1 << 60)


@settings(max_examples=100)
@example([[1, 1 << 51]], "bfloat16")
@given(st.lists(st.lists(DIMS, max_size=4), min_size=1, max_size=3), st.sampled_from(["int8", "bfloat16"]))
def test_shapes_of_any_size_are_counted_exactly_or_refused(shapes: list[list[int]], dtype: str) -> None:
    itemsize = 1 if dtype == "int8" else 2
    total = sum(math.prod(shape) for shape in shapes) * itemsize
    spans = [math.prod(dim or 1 for dim in shape) * itemsize for shape in shapes]
    if not total or total > MOST or max(spans) > MOST:
        with pytest.raises(PlanError) as caught:
            plan(*(TensorMeta(f"t{i}", dtype, tuple(shape)) for i, shape in enumerate(shapes)))
        assert caught.value.parameter in {f"t{i}" for i in range(len(shapes))}
        return
    made = plan(*(TensorMeta(f"t{i}", dtype, tuple(shape)) for i, shape in enumerate(shapes)))
    assert made.total_nbytes == total
    assert made.num_buckets == 1
    assert 0 <= made.bucket(0).nbytes - total < 256 * len(shapes)


@settings(max_examples=100)
@example((2, 1), (1, 1), (-(1 << 63), 32768), 1)
@example((0, 0), (2, 1), (1 << 52, 1), 0)
@given(st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS), NUMBERS)
def test_segments_anywhere_fit_or_are_refused(
    offset: tuple[int, int], extent: tuple[int, int], strides: tuple[int, int], byte_offset: int
) -> None:
    meta = TensorMeta("w", "int8", (4, 6))
    segment = Segment("w", Box(offset, extent), "w", byte_offset, strides)
    inside = all(0 <= low <= low + size <= dim for low, size, dim in zip(offset, extent, (4, 6), strict=True))
    # The stride of a dimension of one element leads nowhere.
    steps = sum(abs(stride) * max(size - 1, 0) for stride, size in zip(strides, extent, strict=True))
    fits = all(-(1 << 63) <= number < 1 << 63 for number in (byte_offset, *strides))
    if not inside or not fits or abs(byte_offset) + steps + 1 > MOST:
        with pytest.raises(PlanError, match=r"^w: "):
            Layout.from_ranks([RankLayout((meta,), (segment,))])
        return
    layout = Layout.from_ranks([RankLayout((meta,), (segment,))])
    assert layout.segments(0) == (segment,)


@pytest.mark.parametrize("entry", [(-1, 2), (0, 1 << 63), (1 << 64, 1), (1 << 63, 1), (5, 20), (3, -1)])
def test_padding_outside_of_its_buffer_is_refused(entry: tuple[int, int]) -> None:
    meta = TensorMeta("w", "int8", (4, 6))
    with pytest.raises(PlanError, match=r"^w: rank 0: .* lie outside its 24 bytes"):
        Layout.from_ranks([RankLayout((meta,), (), buffers=(meta,), padding=(("w", *entry),))])


def test_numpy_sizes_do_not_wrap_around() -> None:
    with pytest.raises(PlanError, match=r"^w: .* spans 18446744073709551616 bytes"):
        TensorMeta("w", "int8", (np.int64(1 << 32), np.int64(1 << 32)))


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^a: none of the 2 tensors has an element"):
        plan(TensorMeta("a", "int8", (0, 3)), TensorMeta("b", "int8", (0,)))
    with pytest.raises(PlanError, match="none of the 0 tensors"):
        plan()


def test_a_model_beyond_all_memory_is_refused_by_its_largest_tensor() -> None:
    metas = [TensorMeta(f"t{i}", "int8", (size,)) for i, size in enumerate([1 << 51, 1 << 52])]
    with pytest.raises(PlanError, match=r"^t1: all tensors have 6755399441055744 bytes together"):
        plan(*metas)
