"""The proof of coverage against counting elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, Members, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.layout.balance import choose

BUCKET = {"bucket_bytes": 1 << 20, "max_staging_bytes": 1 << 30}


def side(boxes: list[list[tuple[TensorMeta, Box]]], metas: tuple[TensorMeta, ...]) -> Layout:
    return Layout.from_ranks(
        [
            RankLayout(
                metas, tuple(Segment(meta.name, box, meta.name, 0, (1,) * box.ndim) for meta, box in rank)
            )
            for rank in boxes
        ]
    )


def guillotine(draw: st.DrawFn, box: Box, cuts: int) -> list[Box]:
    """A random tiling that is no grid: boxes cut again and again along random dimensions."""
    parts = [box]
    for _ in range(cuts):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, box.ndim - 1))
        at = draw(st.integers(0, part.extent[dim]))
        for low, size in ((0, at), (at, part.extent[dim] - at)):
            offset = tuple(o + low * (d == dim) for d, o in enumerate(part.offset))
            parts.append(Box(offset, tuple(size if d == dim else e for d, e in enumerate(part.extent))))
    return parts


@st.composite
def broken_tilings(draw: st.DrawFn) -> tuple[TensorMeta, list[Box]]:
    """A tiling, in which some boxes may be dropped, moved or added."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    boxes = guillotine(draw, Box((0,) * len(shape), shape), draw(st.integers(0, 5)))
    for _ in range(draw(st.integers(0, 2))):
        if boxes and draw(st.booleans()):
            boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        else:
            offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
            extent = tuple(draw(st.integers(1, s - o)) for s, o in zip(shape, offset, strict=True))
            boxes.append(Box(offset, extent))
    return TensorMeta("w", "int8", shape), draw(st.permutations(boxes))


@settings(max_examples=100)
@given(broken_tilings())
def test_a_plan_is_made_exactly_if_each_element_is_held_once(case: tuple[TensorMeta, list[Box]]) -> None:
    """Each box on a rank of its own, so that identical ones are replicas and count once."""
    meta, boxes = case
    held = np.zeros(meta.shape, np.int64)
    for box in {box for box in boxes if box.numel}:
        held[box.slices()] += 1
    whole = TensorMeta("a", "int8", (2, 2))
    source = side([[(meta, box), (whole, Box((0, 0), (2, 2)))] for box in boxes] or [[]], (whole, meta))
    members = Members(1, (0,) * source.num_ranks, (("e", (0,)),))
    engines = {"e": side([[(meta, Box((0,) * len(meta.shape), meta.shape))]], (meta, whole))}
    if (held == 1).all() and boxes:
        plan = make_plan(source, engines, members, **BUCKET)
        sent = np.zeros(meta.shape, np.int64)
        for piece in plan.bucket(0).pieces:
            if piece.tensor == 0:
                sent[piece.box.slices()] += 1
        assert (sent == 1).all()
        return
    with pytest.raises(PlanError) as caught:
        make_plan(source, engines, members, **BUCKET)
    assert caught.value.parameter == "w"
    first = tuple(np.argwhere(held != 1)[0].tolist())
    assert f"at {first}" in caught.value.problem
    assert ("no trainer holds" in caught.value.problem) == (held[first] == 0)
    if held[first] > 1:
        over = {
            box
            for box in boxes
            if all(o <= i < e for o, i, e in zip(box.offset, first, box.end, strict=True))
        }
        ranks = [f"rank {boxes.index(box)} holds {[*box.offset]} to {[*box.end]}" for box in over]
        assert sum(each in caught.value.problem for each in ranks) == 2, "two ranks and their boxes are named"


@st.composite
def replica_groups(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    num_ranks = draw(st.integers(1, 6))
    some_ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1).map(sorted)
    groups = draw(st.lists(some_ranks, min_size=1, max_size=30))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))
    return groups, sizes, num_ranks


@given(replica_groups())
def test_each_group_is_sent_by_one_of_its_holders(case: tuple[list[list[int]], list[int], int]) -> None:
    groups, sizes, num_ranks = case
    counts = np.array([len(group) for group in groups])
    start = np.cumsum(counts) - counts
    chosen = choose(start, counts, np.concatenate(groups), np.array(sizes), num_ranks)
    assert ((start <= chosen) & (chosen < start + counts)).all()


@given(
    st.lists(st.sampled_from([3, 64, 1000]) | st.integers(1, 5000), min_size=1, max_size=60),
    st.integers(2, 8),
    st.integers(0, 20_000),
)
def test_replicas_spread_the_bytes(sizes: list[int], num_ranks: int, fixed: int) -> None:
    """No rank sends more than its share by more than one tensor, whatever rank 0 must send anyway."""
    groups = [[0], *([list(range(num_ranks))] * len(sizes))]
    nbytes = np.array([fixed + 1, *sizes])
    counts = np.array([len(group) for group in groups])
    ranks = np.concatenate(groups)
    chosen = choose(np.cumsum(counts) - counts, counts, ranks, nbytes, num_ranks)
    loads = np.bincount(ranks[chosen], nbytes, num_ranks)
    assert loads.max() <= max(fixed + 1, nbytes.sum() / num_ranks + max(sizes))


def test_neighbours_come_from_different_ranks() -> None:
    """So that the ranks stage at the same time, not one after another."""
    counts = np.full(8, 4)
    start = np.arange(8) * 4
    chosen = choose(start, counts, np.tile(np.arange(4), 8), np.full(8, 100), 4)
    assert ((chosen - start).reshape(2, 4) == np.arange(4)).all()


def test_a_box_twice_on_one_rank_is_no_replica() -> None:
    meta = TensorMeta("w", "int8", (4,))
    whole = (meta, Box((0,), (4,)))
    members = Members(1, (0,), (("e", (0,)),))
    with pytest.raises(PlanError, match="w: trainer rank 0 declares one box of it twice"):
        make_plan(side([[whole, whole]], (meta,)), {"e": side([[whole]], (meta,))}, members, **BUCKET)
