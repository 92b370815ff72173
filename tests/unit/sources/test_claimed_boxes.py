"""Whatever ranks hold alike is compared, and a difference in any of them shows and is named."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.reshard_strategies import Sides, sides
from weightsync.driver.agreement import dissenters
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.direct.direct_plan import make_direct_plan
from weightsync.plan.layout.replicas import MOST_ROUNDS
from weightsync.protocol.messages import Compared, combine
from weightsync.sources.claimed_boxes import ClaimedBoxes


@dataclass
class Ranks:
    """Trainer ranks with their memory, and what each of them claims."""

    plan: Plan
    layouts: list[RankLayout]
    memories: list[dict[str, np.ndarray]]
    boxes: list[ClaimedBoxes]
    live: list[dict[str, torch.Tensor]]

    @classmethod
    def of(cls, made: Sides, has_pieces: bool, are_strays: bool) -> Ranks:
        source, engine = made.trainers_layout(), made.engine()
        holders = tuple(range(source.num_ranks, source.num_ranks + engine.num_ranks))
        members = Members(
            source.num_ranks + engine.num_ranks, tuple(range(source.num_ranks)), (("e0", holders),)
        )
        if has_pieces:
            sizes = {"bucket_bytes": 1 << 20, "max_staging_bytes": 8 << 20}
            plan = make_plan(source.whole, {"e0": engine}, members, **sizes)
        else:
            plan = make_direct_plan(source, {"e0": engine}, members, bucket_bytes=1 << 20)
        layouts = [table.rank_layout() for table in made.trainer_tables()]
        dtype = getattr(torch, made.tensors[0].dtype)
        memories = [rank.memory for rank in made.trainers]
        live = [{name: as_tensor(each, dtype) for name, each in memory.items()} for memory in memories]
        boxes = [
            ClaimedBoxes(plan, number, layout, tensors, tensors.keys() if are_strays else ())
            for number, (layout, tensors) in enumerate(zip(layouts, live, strict=True))
            if plan.replicas
        ]
        return cls(plan, layouts, memories, boxes, live)

    @property
    def rounds(self) -> tuple[int, ...]:
        assert self.plan.replicas
        return tuple(range(self.plan.replicas.num_rounds))

    def compare(self, rounds: tuple[int, ...]) -> list[Compared]:
        pairs = zip(self.boxes, self.live, strict=True)
        return [boxes.compare(rounds, lambda live=live: live) for boxes, live in pairs]  # type: ignore[misc]

    def differ(self, rounds: tuple[int, ...]) -> bool:
        return bool(combine([each.agreement for each in self.compare(rounds)]).any())

    def shared(self, rank: int) -> set[tuple[str, Box]]:
        """What other ranks hold, too, by the names of the layouts."""
        others = [each for number, each in enumerate(self.layouts) if number != rank]
        held = {(each.tensor, each.box) for layout in others for each in layout.segments}
        mine = {(each.tensor, each.box) for each in self.layouts[rank].segments if each.box.numel}
        return mine & held


def as_tensor(memory: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    raw = memory.reshape(-1)
    return torch.from_numpy(raw[: len(raw) // dtype.itemsize * dtype.itemsize]).view(dtype)


@settings(max_examples=15)
@given(sides(), st.booleans(), st.booleans(), st.data())
def test_one_flipped_bit_of_any_replica_is_found_in_its_round_and_its_rank_is_named(
    made: Sides, has_pieces: bool, are_strays: bool, data: st.DataObject
) -> None:
    ranks = Ranks.of(made, has_pieces, are_strays)
    plan = ranks.plan
    shared = [ranks.shared(rank) for rank in range(len(ranks.layouts))]
    assert bool(plan.replicas) == any(shared)
    if not plan.replicas:
        return
    every = ranks.rounds
    assert len(every) <= MOST_ROUNDS, "what is promised"
    assert not any(ranks.differ((number,)) for number in every)
    before = ranks.compare(every)
    assert not combine([each.agreement for each in before]).any()
    tied = dict(made.source().tied)
    for rank, its in enumerate(shared):
        claims = plan.replicas.claims(rank)
        found = {
            (
                tied.get(plan.tensors[t].name, plan.tensors[t].name),
                tuple(offset[: len(plan.tensors[t].shape)]),
            )
            for t, offset in zip(claims.tensor.tolist(), claims.offset.tolist(), strict=True)
        }
        assert found == {(name, box.offset) for name, box in its}
        assert before[rank].digests.all(), "all that is claimed is digested in the first update"
        assert set(claims.round.tolist()) <= set(every), "and in one of the later ones"

    rank = data.draw(st.sampled_from([number for number, its in enumerate(shared) if its]))
    name, box = data.draw(st.sampled_from(sorted(shared[rank], key=str)))
    segment = next(s for s in ranks.layouts[rank].segments if (s.tensor, s.box) == (name, box))
    at = [data.draw(st.integers(0, size - 1)) for size in box.extent]
    itemsize = made.tensors[0].itemsize
    byte = segment.byte_offset + sum(i * s for i, s in zip(at, segment.strides, strict=True))
    byte += data.draw(st.integers(0, itemsize - 1))
    ranks.memories[rank][segment.buffer].reshape(-1)[byte] ^= 1 << data.draw(st.integers(0, 7))

    after = ranks.compare(every)
    assert combine([each.agreement for each in after]).any()
    claims = plan.replicas.claims(rank)
    changed = np.flatnonzero(after[rank].digests != before[rank].digests)
    assert len(changed), "the flipped bit is in a box that is digested"
    rounds = {*claims.round[changed].tolist()}
    assert {number for number in every if ranks.differ((number,))} == rounds
    tensors = np.unique(claims.tensor[changed]).tolist()
    named = dissenters(plan.replicas, {i: each.digests for i, each in enumerate(after)}, every)
    assert named[rank] == tensors
    if claims.count[changed].min() > 2:
        assert [*named] == [rank], "a majority holds the same"
    for number in rounds:
        found_then = ranks.compare((number,))
        told = dissenters(plan.replicas, {i: each.digests for i, each in enumerate(found_then)}, (number,))
        assert set(told[rank]) <= set(tensors)


def plan_of(held: list[TensorMeta], taken: list[TensorMeta], num_ranks: int) -> tuple[Plan, RankLayout]:
    """Ranks that each hold everything, and the layout of each of them."""
    trainer, engine = (
        RankLayout(tuple(metas), tuple(map(Segment.whole, metas)), buffers=tuple(metas))
        for metas in (held, taken)
    )
    sides = Layout.from_ranks([trainer] * num_ranks), {"e": Layout.from_ranks([engine])}
    members = Members(1, (0,) * num_ranks, (("e", (0,)),))
    return make_plan(*sides, members, bucket_bytes=1024, max_staging_bytes=1 << 20), trainer


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_boxes_are_compared_as_they_travel(device: str) -> None:
    """What a cast to the engine's dtype rounds away is no difference."""
    kinds = {"cast": "float32", "same": "bfloat16"}
    trainer = [TensorMeta(name, kind, (4, 6)) for name, kind in kinds.items()]
    plan, layout = plan_of(trainer, [TensorMeta(name, "bfloat16", (4, 6)) for name in kinds], 2)
    live = [
        {name: torch.ones(4, 6, dtype=getattr(torch, kind), device=device) for name, kind in kinds.items()}
        for _ in range(2)
    ]
    boxes = [ClaimedBoxes(plan, rank, layout, each, ()) for rank, each in enumerate(live)]

    def differ() -> bool:
        pairs = zip(boxes, live, strict=True)
        each = [of.compare((0, 1), lambda its=its: its).agreement for of, its in pairs]  # type: ignore[misc]
        return bool(combine(each).any())

    assert not differ()
    live[1]["cast"][2, 3] += 1e-6
    assert not differ()
    for name in kinds:
        live[1][name][2, 3] += 1
        assert differ()
        live[1][name].copy_(live[0][name])
        assert not differ()


@pytest.mark.parametrize("num_ranks", [2, 3, 7, 128])
def test_a_tensor_that_all_but_one_rank_hold_alike_names_that_one(num_ranks: int) -> None:
    metas = [TensorMeta(f"w{number}", "float32", (3, 5)) for number in range(4)]
    plan, layout = plan_of(metas, metas, num_ranks)
    live = [{meta.name: torch.full((3, 5), 7.0) for meta in metas} for _ in range(num_ranks)]
    live[-1]["w2"][1, 1] = -7
    boxes = [ClaimedBoxes(plan, rank, layout, each, ()) for rank, each in enumerate(live)]
    found = {rank: each.compare(range(4), dict).digests for rank, each in enumerate(boxes)}
    assert plan.replicas
    wrong = {num_ranks - 1: [2]} | ({0: [2]} if num_ranks == 2 else {})
    assert dissenters(plan.replicas, found, range(4)) == wrong
