"""Broadcast plans, carried out byte for byte, and refused when something is wrong with the layouts."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import (
    World,
    check_live,
    execute,
    replace_segment,
    worlds,
)
from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, broadcast_groups, make_plan

BUCKETS = st.sampled_from([256, 300, 512, 1024, 4096, 1 << 20])


def check_shape(plan: Plan) -> None:
    """Alignment, order and contiguity that senders and receivers rely on."""
    send_buffer_ends: Counter[int] = Counter()
    index = 0
    for number, bucket in enumerate(plan.buckets()):
        assert bucket.index == number
        assert 0 < bucket.nbytes <= plan.bucket_bytes
        pieces = list(bucket.pieces)
        end = 0
        for step in bucket.steps:
            assert (step.index, step.bucket) == (index, number)
            assert step.root == plan.members.trainers[step.trainer]
            assert step.offset == end
            assert step.send_buffer_offset == send_buffer_ends[step.trainer]
            at = 0
            while pieces and pieces[0].trainer == step.trainer:
                piece = pieces.pop(0)
                assert (piece.bucket, piece.offset - step.offset) == (number, at)
                assert piece.send_buffer_offset - step.send_buffer_offset == at
                at += -(-piece.nbytes // 16) * 16
            assert step.nbytes == at > 0
            end += -(-at // 256) * 256
            send_buffer_ends[step.trainer] += -(-at // 256) * 256
            index += 1
        assert not pieces
        assert end == bucket.nbytes
        roots = [(step.root, step.trainer) for step in bucket.steps]
        assert roots == sorted(set(roots))
    assert all(plan.send_buffer_nbytes(t) == send_buffer_ends[t] for t in range(len(plan.members.trainers)))
    assert index == len(plan.steps)


@given(worlds(), BUCKETS, st.data())
def test_frozen_tensors_have_the_last_buckets_to_themselves(
    world: World, bucket_bytes: int, data: st.DataObject
) -> None:
    names = [meta.name for meta in world.tensors]
    world = replace(world, frozen=data.draw(st.frozensets(st.sampled_from(names))))
    plan = world.plan(bucket_bytes)
    check_shape(plan)
    execute(world, plan)
    assert {plan.tensors[i].name for i in plan.frozen} == world.frozen
    for bucket in plan.buckets():
        is_frozen = {piece.tensor in plan.frozen for piece in bucket.pieces}
        assert is_frozen == {bucket.index >= plan.num_changing_buckets}


@given(worlds(), BUCKETS)
def test_what_is_carried_out_equals_gather_then_slice(world: World, bucket_bytes: int) -> None:
    plan = world.plan(bucket_bytes)
    check_shape(plan)
    execute(world, plan)
    check_live(world)
    assert plan.total_nbytes == sum(meta.nbytes for meta in world.tensors)
    assert plan.total_nbytes == sum(p.nbytes for bucket in plan.buckets() for p in bucket.pieces)
    assert plan.num_pieces == sum(len(plan.trainer_pieces(t)) for t in range(len(world.trainers)))


def sides(world: World) -> list[tuple[str, list]]:
    return [("source", world.trainers), *world.engines.items()]


@given(worlds(), st.data())
def test_a_dropped_segment_is_refused_by_name(world: World, data: st.DataObject) -> None:
    side, ranks = data.draw(st.sampled_from(sides(world)))
    rank = data.draw(st.sampled_from(ranks))
    held = [i for i, s in enumerate(rank.segments) if s.box.numel]
    assume(held)
    gone = rank.segments.pop(data.draw(st.sampled_from(held)))
    replica = side == "source" and any(
        s.tensor == gone.tensor and s.box == gone.box for other in ranks for s in other.segments
    )
    if replica:
        execute(world, world.plan())
        check_live(world)
        return
    with pytest.raises(PlanError) as caught:
        world.plan()
    assert caught.value.parameter == (gone.tensor if side == "source" else gone.buffer)


@given(worlds(), st.data())
def test_a_segment_given_twice_is_refused_by_name(world: World, data: st.DataObject) -> None:
    side, ranks = data.draw(st.sampled_from(sides(world)))
    rank = data.draw(st.sampled_from(ranks))
    held = [s for s in rank.segments if s.box.numel]
    assume(held)
    twice = data.draw(st.sampled_from(held))
    rank.segments.append(twice)
    with pytest.raises(PlanError) as caught:
        world.plan()
    assert caught.value.parameter == (twice.tensor if side == "source" else twice.buffer)


@given(worlds(), st.data())
def test_a_shifted_segment_is_refused_by_name(world: World, data: st.DataObject) -> None:
    """In the trainer's tensor, or in the engine's live parameter."""
    side, ranks = data.draw(st.sampled_from(sides(world)))
    rank = data.draw(st.sampled_from(ranks))
    held = [i for i, s in enumerate(rank.segments) if s.box.numel and s.box.ndim]
    assume(held)
    index = data.draw(st.sampled_from(held))
    segment = rank.segments[index]
    by = data.draw(st.sampled_from([-1, 1]))
    if side == "source":
        box = Box((segment.box.offset[0] + by, *segment.box.offset[1:]), segment.box.extent)
        others = [s.box for other in ranks for s in other.segments if s.tensor == segment.tensor]
        assume(box not in others)  # it would pass for a replica of another shard
        replace_segment(rank, index, box=box)
    else:
        replace_segment(rank, index, byte_offset=segment.byte_offset + by)
    with pytest.raises(PlanError) as caught:
        world.plan()
    assert caught.value.parameter == (segment.tensor if side == "source" else segment.buffer)


@given(worlds(), st.data())
def test_a_wrong_shape_or_name_is_refused_by_name(world: World, data: st.DataObject) -> None:
    meta = data.draw(st.sampled_from([m for m in world.tensors if m.shape]))
    if data.draw(st.booleans()):
        wrong = replace(meta, shape=(meta.shape[0] + 1, *meta.shape[1:]))
        says = f"{wrong.shape} at the source, {meta.shape} at the engine"
    else:
        wrong = replace(meta, name=meta.name + "_x")
        says = f"did you mean '{meta.name}_x'"
    ranks = [
        RankLayout(
            tuple(wrong if m == meta else m for m in world.tensors),
            tuple(replace(s, tensor=wrong.name) if s.tensor == meta.name else s for s in rank.segments),
        )
        for rank in world.trainers
    ]
    with pytest.raises(PlanError) as caught:
        replan(world, Layout.from_ranks(ranks))
    assert caught.value.parameter == meta.name
    assert says in caught.value.problem


def replan(world: World, source: Layout) -> Plan:
    return make_plan(source, world.targets(), world.members(), bucket_bytes=1024, max_staging_bytes=1 << 30)


@given(worlds(), BUCKETS)
def test_the_digest_is_the_plan(world: World, bucket_bytes: int) -> None:
    plan = world.plan(bucket_bytes)
    assert plan.digest() == pickle.loads(pickle.dumps(plan)).digest() == plan.digest(plan.content())
    for rank in world.trainers:
        rank.segments.reverse()
    world.engines = dict(reversed(world.engines.items()))
    members = plan.members
    again = replace_members(world, members, bucket_bytes)
    assert again.digest() == plan.digest()
    moved = Members(members.num_holders + 1, members.trainers, members.engines)
    others = [
        plan,
        world.plan(bucket_bytes + 1),
        world.plan(bucket_bytes, epoch=1),
        world.plan(bucket_bytes, slots=3),
        replace_members(world, moved, bucket_bytes),
    ]
    assert len({other.digest() for other in others}) == len(others)


def replace_members(world: World, members: Members, bucket_bytes: int) -> Plan:
    return make_plan(
        world.source(), world.targets(), members, bucket_bytes=bucket_bytes, max_staging_bytes=1 << 40
    )


def test_together_all_holders_have_one_group() -> None:
    members = Members(5, (0, 1), (("e", (2, 3)),))
    assert broadcast_groups(members) == {0: (0, 2, 3), 1: (1, 2, 3)}
    assert broadcast_groups(members, together=True) == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    beside = Members(2, (0, 1), (("e", (0, 1)),))
    assert broadcast_groups(beside) == broadcast_groups(beside, together=True)
