"""A plan for engines that read directly has no pieces: each trainer digests what it holds."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.unit.plan.reshard_strategies import Sides, sides
from weightsync.errors import PlanError
from weightsync.plan import Box, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.broadcast.plan import share_in_place
from weightsync.plan.direct.direct_plan import make_direct_plan
from weightsync.plan.layout.layout import Layout
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.trainers_layout import TrainersLayout

BUCKET = 1 << 20
META = TensorMeta("w", "bfloat16", (8, 4))


def members(num_trainers: int, num_ranks: int) -> Members:
    holders = tuple(range(num_trainers, num_trainers + num_ranks))
    return Members(num_trainers + num_ranks, tuple(range(num_trainers)), (("e0", holders),))


def times_digested(plan: Plan, ranks: list[RankLayout]) -> list[np.ndarray]:
    """How often each element of each tensor is in the share of a rank."""
    counts = [np.zeros(meta.shape, np.int64) for meta in plan.tensors]
    for trainer, layout in enumerate(ranks):
        for tensor, box, segment in share_in_place(plan, trainer, layout):
            assert segment.box.contains(box)
            counts[tensor][box.slices()] += 1
    return counts


@given(sides())
def test_each_element_is_digested_once_with_and_without_pieces(made: Sides) -> None:
    source, engine = made.trainers_layout(), made.engine()
    its = members(source.num_ranks, engine.num_ranks)
    plan = make_direct_plan(source, {"e0": engine}, its, bucket_bytes=BUCKET, epoch=3)
    assert (plan.replicas is not None) == (made.reshard().most_replicas > 1)
    whole = make_plan(source.whole, {"e0": engine}, its, bucket_bytes=BUCKET, max_staging_bytes=8 * BUCKET)
    ranks = [table.rank_layout() for table in made.trainer_tables()]
    for each in (plan, whole):
        assert all((counts == 1).all() for counts in times_digested(each, ranks))
    assert (plan.num_buckets, plan.num_changing_buckets, plan.num_pieces, plan.max_bucket_nbytes) == (0,) * 4
    assert (plan.tensors, plan.tied, plan.frozen) == (whole.tensors, whole.tied, whole.frozen)
    assert pickle.loads(pickle.dumps(plan)).digest() == plan.digest() != whole.digest()
    assert replace(plan, replicas=None).digest() != plan.digest() or not plan.replicas


def test_ranks_that_hold_the_same_boxes_share_them_about_evenly() -> None:
    metas = tuple(replace(META, name=f"w{number}") for number in range(12))
    boxes = [UPPER, LOWER]
    ranks = [rank(*[boxes[number % 2]] * 12, metas=metas) for number in range(6)]
    engine = Layout.from_ranks([rank(*[Box.whole((8, 4))] * 12, metas=metas)])
    source = TrainersLayout([*map(LayoutTable.of, ranks)])
    plan = make_direct_plan(source, {"e0": engine}, members(6, 1), bucket_bytes=BUCKET)
    assert plan.replicas
    assert len(plan.replicas.place) == 6, "tensors that are cut alike are listed once"
    assert [len(share_in_place(plan, trainer, ranks[trainer])) for trainer in range(6)] == [4] * 6
    assert all((counts == 1).all() for counts in times_digested(plan, ranks))


def rank(*boxes: Box, metas: tuple[TensorMeta, ...] = (META,)) -> RankLayout:
    """A rank with one of `boxes` of each of `metas`."""
    pairs = zip(metas, boxes, strict=True)
    segments = tuple(Segment(m.name, box, m.name, 0, box.strides(m.itemsize)) for m, box in pairs)
    return RankLayout(metas, segments, buffers=metas)


UPPER, LOWER = Box((0, 0), (4, 4)), Box((4, 0), (4, 4))


@pytest.mark.parametrize("second", [Box((5, 0), (3, 4)), Box((3, 0), (5, 4))], ids=["a hole", "an overlap"])
def test_boxes_that_do_not_tile_a_tensor_are_named_as_for_broadcasts(second: Box) -> None:
    """Also if the tensor is the second of two that ranks cut almost alike."""
    metas = (replace(META, name="v"), META)
    ranks = [rank(UPPER, UPPER, metas=metas), rank(LOWER, second, metas=metas)]
    engine = Layout.from_ranks([rank(Box.whole((8, 4)), Box.whole((8, 4)), metas=metas)])
    source, its = TrainersLayout([*map(LayoutTable.of, ranks)]), members(2, 1)
    with pytest.raises(PlanError) as direct:
        make_direct_plan(source, {"e0": engine}, its, bucket_bytes=BUCKET)
    with pytest.raises(PlanError) as broadcast:
        make_plan(
            Layout.from_ranks(ranks), {"e0": engine}, its, bucket_bytes=BUCKET, max_staging_bytes=8 * BUCKET
        )
    assert str(direct.value) == str(broadcast.value)
    assert str(direct.value).startswith("w")


def test_equal_boxes_of_tensors_of_other_shapes_are_not_taken_for_alike() -> None:
    metas = (META, replace(META, name="x", shape=(9, 4)))
    ranks = [rank(UPPER, UPPER, metas=metas), rank(LOWER, LOWER, metas=metas)]
    engine = Layout.from_ranks([rank(Box.whole((8, 4)), Box.whole((9, 4)), metas=metas)])
    with pytest.raises(PlanError, match="x"):
        make_direct_plan(
            TrainersLayout([*map(LayoutTable.of, ranks)]), {"e0": engine}, members(2, 1), bucket_bytes=BUCKET
        )
