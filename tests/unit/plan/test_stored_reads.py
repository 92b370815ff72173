"""What a rank with quantised weights reads: whole blocks of what it keeps, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.direct import stored_reads
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.direct.stored_reads import stored_reads as find
from weightsync.plan.layout.coverage import covers_all
from weightsync.plan.layout.formats import Format

BLOCKS = Format(rule="fp8", values="float8_e4m3fn", block=(4, 8))
CHANNELS = Format(rule="compressed-tensors", values="int8", block=(1, 0))


def kept(meta: TensorMeta, axis: int, rank: int, num_ranks: int, size: int) -> Segment:
    """Return a rank's share along an axis, in whole runs of `size`."""
    num = -(-meta.shape[axis] // size)
    first, end = (min(num * each // num_ranks * size, meta.shape[axis]) for each in (rank, rank + 1))
    offset, extent = [0, 0], [*meta.shape]
    offset[axis], extent[axis] = first, end - first
    box = Box(tuple(offset), tuple(extent))
    return Segment(meta.name, box, meta.name, 0, box.strides(meta.itemsize))


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([(BLOCKS, 0), (BLOCKS, 1), (CHANNELS, 0)]),
    st.integers(1, 3),
    st.sampled_from([1, 64, 1 << 20]),
)
def test_ranks_read_every_block_that_they_keep_once(
    shape: tuple[int, int], kind: tuple[Format, int], num_ranks: int, most: int
) -> None:
    (form, axis), weight = kind, TensorMeta("a.weight", "bfloat16", shape)
    stored = tuple(
        replace(each, dtype="float32") if "scale" in each.name else each for each in form.stored(weight)
    )
    layouts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_reads, "MOST_NUMEL", most)
        for rank in range(num_ranks):
            sizes = form.block[axis], 1
            segments = [
                kept(meta, axis, rank, num_ranks, size) for meta, size in zip(stored, sizes, strict=True)
            ]
            held = [each for each in segments if each.box.numel]
            dtypes = {meta.name: meta.dtype for meta in stored}
            reads = find([weight], RankLayout(stored, tuple(held)), dtypes, {"a.weight": form})
            assert sum(each.box.numel for each in reads) == segments[0].box.numel
            assert all(segments[0].box.contains(each.stored) for each in reads)
            assert all(each.box.numel <= max(most, form.block[0] * each.box.extent[1]) for each in reads)
            layouts.append(reads_layout([weight], (), reads))
    assert covers_all(Layout.from_ranks(layouts))
    if num_ranks > 1 and segments[0].box.numel:
        assert not covers_all(Layout.from_ranks(layouts[:-1]))


WEIGHT = TensorMeta("a.weight", "bfloat16", (16, 16))
VALUES, SCALES = BLOCKS.stored(WEIGHT)


def place(meta: TensorMeta, offset: tuple[int, int], extent: tuple[int, int], gap: int = 0) -> Segment:
    box, size = Box(offset, extent), meta.itemsize
    return Segment(meta.name, box, meta.name, 0, (size * extent[1] + gap, size))


WHOLE = place(VALUES, (0, 0), (16, 16)), place(SCALES, (0, 0), (4, 2))


@pytest.mark.parametrize(
    ("segments", "dtypes", "says"),
    [
        ([place(VALUES, (2, 0), (14, 16)), WHOLE[1]], {}, "a part of a block"),
        ([place(VALUES, (0, 4), (16, 12)), WHOLE[1]], {}, "a part of a block"),
        ([place(VALUES, (0, 0), (8, 16)), WHOLE[1]], {}, "a part of a block"),
        ([WHOLE[0]], {}, "a rank cannot read a part"),
        ([*WHOLE, WHOLE[0]], {}, "a rank cannot read a part"),
        ([place(VALUES, (0, 0), (16, 16), gap=8), WHOLE[1]], {}, "lies between others"),
        (WHOLE, {SCALES.name: "uint8"}, "it is kept as uint8, not as float32"),
    ],
)
def test_what_cannot_be_read_in_parts_is_named(
    segments: list[Segment], dtypes: dict[str, str], says: str
) -> None:
    stored = RankLayout((VALUES, SCALES), tuple(segments))
    held = {VALUES.name: VALUES.dtype, SCALES.name: SCALES.dtype} | dtypes
    with pytest.raises(PlanError, match=f"a.weight.*{says}"):
        find([WEIGHT], stored, held, {WEIGHT.name: BLOCKS})


def test_a_stride_of_one_element_says_nothing() -> None:
    weight = TensorMeta("a.weight", "bfloat16", (4, 8))
    values, scales = BLOCKS.stored(weight)
    scales = replace(scales, dtype="float32")
    places = Segment.whole(values), replace(Segment.whole(scales), strides=(64, 512))
    dtypes = {each.name: each.dtype for each in (values, scales)}
    (read,) = find([weight], RankLayout((values, scales), places), dtypes, {weight.name: BLOCKS})
    assert read.box == Box((0, 0), (4, 8))


def test_what_is_stored_and_comes_from_nowhere_is_named() -> None:
    other = TensorMeta("b.weight", "bfloat16", (4,))
    with pytest.raises(PlanError, match=r"b\.weight.*made of no tensor"):
        find([], RankLayout((other,), ()), {}, {})


def test_what_is_cast_is_named() -> None:
    norm = TensorMeta("n.weight", "float32", (4,))
    stored = RankLayout((norm,), (Segment.whole(norm),))
    with pytest.raises(PlanError, match=r"n\.weight.*kept as float32, not as bfloat16"):
        find([replace(norm, dtype="bfloat16")], stored, {norm.name: "float32"}, {})
