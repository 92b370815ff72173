"""Live coverage: each byte of each live parameter exactly once, against painting the bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import contiguous
from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.coverage import check_live

TENSOR = TensorMeta("w", "bfloat16", (64, 64, 64))


def engine(
    segments: list[Segment], buffers: list[TensorMeta], padding: list[tuple[str, int, int]] | None = None
) -> Layout:
    return Layout.from_ranks(
        [RankLayout((TENSOR,), tuple(segments), (), tuple(buffers), tuple(padding or ()))]
    )


def segment(
    extent: tuple[int, int, int], at: int, strides: tuple[int, int, int], buffer: str = "p"
) -> Segment:
    return Segment("w", Box((0, 0, 0), extent), buffer, at, strides)


@st.composite
def cut_parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Segment], list[tuple[str, int, int]]]:
    """A parameter cut into a grid of strided blocks, dimensions in any order, some dropped or doubled."""
    shape = draw(st.tuples(*[st.integers(1, 6)] * 3))
    strides = contiguous(shape, 2)
    steps = [draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])) for size in shape]
    interleaved = draw(st.booleans())
    segments, padding = [], []
    for cell in itertools.product(*(range(step) for step in steps)):
        extent = tuple(size // step for size, step in zip(shape, steps, strict=True))
        if interleaved:
            start = sum(c * s for c, s in zip(cell, strides, strict=True))
            pace = tuple(s * step for s, step in zip(strides, steps, strict=True))
        else:
            start = sum(c * e * s for c, e, s in zip(cell, extent, strides, strict=True))
            pace = strides
        turn = draw(st.permutations(range(3)))
        made = segment(tuple(extent[i] for i in turn), start, tuple(pace[i] for i in turn))
        for _ in range(draw(st.sampled_from([1] * 12 + [0, 2]))):
            if extent == (1, 1, 1) and draw(st.booleans()):
                padding.append(("p", start, 2))
            else:
                segments.append(made)
    return shape, draw(st.permutations(segments)), padding


@settings(max_examples=100)
@given(cut_parameters())
def test_accepted_exactly_if_each_byte_is_written_once(
    case: tuple[tuple[int, int, int], list[Segment], list[tuple[str, int, int]]],
) -> None:
    shape, segments, padding = case
    meta = TensorMeta("p", "bfloat16", shape)
    written = np.zeros(meta.nbytes, np.int64)
    for made in segments:
        for index in itertools.product(*(range(e) for e in made.box.extent)):
            start = made.byte_offset + sum(i * s for i, s in zip(index, made.strides, strict=True))
            written[start : start + 2] += 1
    for _, start, nbytes in padding:
        written[start : start + nbytes] += 1
    layout = engine(segments, [meta], padding)
    if (written == 1).all():
        check_live("e", layout)
        return
    with pytest.raises(PlanError, match="engine e, rank 0") as caught:
        check_live("e", layout)
    assert caught.value.parameter == "p"
    first = int((written != 1).argmax())
    word = "several segments write" if written[first] else "no segment writes"
    assert f"{word} byte {first} of" in caught.value.problem


def test_interleaved_elements_are_proven_without_listing_them() -> None:
    """gate and up alternating in 2e9 elements: listing the runs would take tens of gigabytes."""
    meta = TensorMeta("w", "bfloat16", (1 << 10, 1 << 10, 1 << 10))
    strides = (4 << 20, 4 << 10, 4)
    whole = Box((0, 0, 0), meta.shape)
    segments = tuple(Segment("w", whole, "p", at, strides) for at in (0, 2))
    live = TensorMeta("p", "bfloat16", (1 << 10, 1 << 10, 2 << 10))
    check_live("e", Layout.from_ranks([RankLayout((meta,), segments, buffers=(live,))]))


def test_the_fault_is_found_in_the_buffer_and_the_rank_that_has_it() -> None:
    metas = [TensorMeta(name, "bfloat16", (2, 2)) for name in ("first", "second")]
    good = [segment((1, 2, 2), 0, (8, 4, 2), name) for name in ("first", "second")]
    bad = [good[0], segment((1, 2, 1), 0, (8, 4, 2), "second")]
    layout = Layout.from_ranks(
        [RankLayout((TENSOR,), tuple(made), buffers=tuple(metas)) for made in (good, bad)]
    )
    with pytest.raises(PlanError, match="second: engine e, rank 1: no segment writes byte 2 of"):
        check_live("e", layout)


def test_ranks_without_buffers_are_not_checked() -> None:
    layout = Layout.from_ranks(
        [
            RankLayout(
                (TENSOR,), (segment((1, 1, 2), 0, (4, 4, 2)),), buffers=(TensorMeta("p", "bfloat16", (2,)),)
            ),
            RankLayout((TENSOR,), (segment((1, 1, 2), 77, (4, 4, 2), "loader"),)),
        ]
    )
    check_live("e", layout)


def test_raw_bytes_take_any_dtype() -> None:
    check_live("e", engine([segment((1, 1, 2), 0, (4, 4, 2))], [TensorMeta("p", "uint8", (4,))]))


@pytest.mark.parametrize(
    ("made", "buffer", "says"),
    [
        (segment((1, 1, 2), 2, (4, 4, 2)), TensorMeta("p", "bfloat16", (2,)), "bytes 2 to 6 lie outside"),
        (segment((1, 1, 2), -2, (4, 4, 2)), TensorMeta("p", "bfloat16", (2,)), "lie outside"),
        (segment((1, 1, 2), 0, (4, 4, 0)), TensorMeta("p", "bfloat16", (2,)), "must be positive"),
        (segment((1, 1, 2), 2, (4, 4, -2)), TensorMeta("p", "bfloat16", (2,)), "must be positive"),
        (segment((1, 1, 2), 0, (4, 4, 2)), TensorMeta("p", "float16", (2,)), "its dtype is not bfloat16"),
        (segment((1, 1, 2), 0, (4, 4, 2), "q"), TensorMeta("p", "bfloat16", (2,)), "did you mean|valid: p"),
    ],
)
def test_a_segment_that_cannot_be_written_names_the_buffer(
    made: Segment, buffer: TensorMeta, says: str
) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        check_live("e", engine([made], [buffer]))
    assert caught.value.parameter == made.buffer


@pytest.mark.parametrize(
    ("strided", "single", "numel"),
    [
        pytest.param([(2, 4, 2), (4, 8, 2)], [(0, 1), (8, 2), (14, 1)], 8, id="strides"),
        pytest.param([(0, 8, 2), (2, 8, 3)], [(4, 2), (12, 3), (20, 1)], 11, id="counts"),
    ],
)
def test_neighbours_of_different_rhythm_are_not_one_run(
    strided: list[tuple[int, int, int]], single: list[tuple[int, int]], numel: int
) -> None:
    """strided: (byte, stride, count) of single elements; single: (byte, elements)."""
    segments = [segment((1, count, 1), at, (64, stride, 2)) for at, stride, count in strided]
    segments += [segment((1, 1, count), at, (64, 64, 2)) for at, count in single]
    check_live("e", engine(segments, [TensorMeta("p", "bfloat16", (numel,))]))
