"""Of each bucket, a rank's portions have all that it needs, and where its trainer ranks have that."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import World, worlds
from weightsync.memory.kernels.bucket_copies import bucket_rows, portion_rows
from weightsync.memory.kernels.host_copies import AddressCopies
from weightsync.plan import Box, Layout, Members, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.broadcast import plan as plans
from weightsync.plan.broadcast.plan import Portion, by_tensor, needed_portions

ROWS, COLUMNS = 64, 32


@given(worlds(), st.sampled_from([256, 1024, 1 << 20]), st.sampled_from([0, 20, 1 << 18]))
def test_they_cover_what_the_rank_reads_from_the_slots(world: World, bucket_bytes: int, gap: int) -> None:
    plan = world.plan(bucket_bytes)
    layouts = [rank.layout(world.tensors, world.tied) for ranks in world.engines.values() for rank in ranks]
    for layout in layouts:
        segments = by_tensor(plan, layout)
        for bucket in range(plan.num_buckets):
            with mock.patch.object(plans, "GAP_NBYTES", gap):
                found = needed_portions(plan, bucket, segments)
            brought = [at for each in found for at in range(each.offset, each.offset + each.nbytes)]
            assert len(brought) == len(set(brought))
            assert needed(plan.bucket(bucket).pieces, plan.tensors, segments) <= set(brought)
            steps = {step.trainer: step for step in plan.bucket_steps(bucket)}
            for each in found:
                step = steps[each.part]
                assert each.source - each.offset == step.send_buffer_offset - step.offset
                assert step.offset <= each.offset < each.offset + each.nbytes <= step.offset + step.nbytes


@given(worlds(), st.sampled_from([256, 1024, 1 << 20]), st.sampled_from([0, 20, 1 << 18]))
def test_they_write_what_the_buckets_write(world: World, bucket_bytes: int, gap: int) -> None:
    plan = world.plan(bucket_bytes)
    buckets = [torch.randint(256, (plan.max_bucket_nbytes,), dtype=torch.uint8) for _ in plan.buckets()]
    layouts = [rank.layout(world.tensors, world.tied) for ranks in world.engines.values() for rank in ranks]
    for layout in layouts:
        segments = by_tensor(plan, layout)
        with mock.patch.object(plans, "GAP_NBYTES", gap):
            needs = [needed_portions(plan, bucket, segments) for bucket in range(plan.num_buckets)]
        brought = [
            [bucket[each.offset : each.offset + each.nbytes].clone() for each in its]
            for bucket, its in zip(buckets, needs, strict=True)
        ]
        ours, theirs = (
            {b.name: torch.zeros(b.nbytes + 1, dtype=torch.uint8) for b in layout.buffers} for _ in "ab"
        )
        places = [[each.data_ptr() for each in its] for its in brought]
        copies = portion_rows(plan, segments, starts(ours), needs, places)
        AddressCopies(
            copies, (0, len(copies)), [*ours.values(), *(each for its in brought for each in its)]
        ).run(0)
        rows, bounds = bucket_rows(plan, segments, starts(theirs), [b.data_ptr() for b in buckets], into=True)
        whole = AddressCopies(rows, bounds, [*theirs.values(), *buckets])
        for bucket in range(plan.num_buckets):
            whole.run(bucket)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def starts(memory: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in memory.items()}


def needed(pieces: object, tensors: object, segments: list[list[Segment]]) -> set[int]:
    """The bytes of the bucket that a segment reads, one element after the other."""
    found: set[int] = set()
    for piece in pieces:  # type: ignore[attr-defined]
        size = tensors[piece.tensor].itemsize  # type: ignore[index]
        strides = piece.box.strides(size)
        for segment in segments[piece.tensor]:
            if part := piece.box.intersect(segment.box):
                for one in part.split(1):
                    start = piece.offset + piece.box.distance(one, strides)
                    found.update(range(start, start + size))
    return found


@pytest.mark.parametrize(
    ("box", "nbytes"),
    [
        (Box((0, 0), (ROWS, COLUMNS)), ROWS * COLUMNS * 4),
        (Box((ROWS // 2, 0), (ROWS // 4, COLUMNS)), ROWS // 4 * COLUMNS * 4),
        (Box((0, COLUMNS // 2), (ROWS, COLUMNS // 2)), (ROWS * COLUMNS - COLUMNS // 2) * 4),
    ],
    ids=["whole", "rows", "columns"],
)
def test_of_rows_that_another_rank_has_nothing_is_copied(box: Box, nbytes: int) -> None:
    meta = TensorMeta("w", "float32", (ROWS, COLUMNS))
    whole = RankLayout((meta,), (Segment.whole(meta),), (), (meta,))
    source = Layout.from_ranks([whole])
    plan = make_plan(
        source,
        {"e": source},
        Members(2, (0,), (("e", (1,)),)),
        bucket_bytes=1 << 20,
        max_staging_bytes=1 << 30,
    )
    own = Segment("w", box, "w", 0, box.strides(4))
    (found,) = needed_portions(plan, 0, [[own]])
    assert found.nbytes == nbytes
    assert needed_portions(plan, 0, [[]]) == []
    assert isinstance(found, Portion)
