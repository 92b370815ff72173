"""One digest of all copies of experts: equal to the trainers' if each copy is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.engines.serving.engine_digests import DigestReduction
from weightsync.memory.kernels.copied_experts import copy_factors
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box, Layout, Members, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.layout.arrangement import Arrangement
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.messages import Digests

STACK = TensorMeta("experts.down_proj", "float32", (4, 3, 2))
NORM = TensorMeta("norm", "float32", (5,))
SLOTS = [[0, 1, 2], [3, 0, 0]], [[0, 1, 2, 3], [0, 1, 2, 3]], [[2, 2, 2, 2], [3, 1, 0, 2]], [[3, 1], [0, 2]]
"""The experts in each slot of two ranks. In the second case both ranks hold the same boxes."""


@pytest.mark.parametrize("count", range(1, 70))
def test_factors_add_up_to_one_and_lose_at_most_one_bit(count: int) -> None:
    factors = copy_factors(count)
    assert sum(factors) % (1 << 64) == 1
    assert len({*factors}) == count
    assert all(factor % 4 for factor in factors)


def layouts(slots: list[list[int]]) -> list[RankLayout]:
    flat, made, seen = [expert for row in slots for expert in row], [], [0] * 4
    for row in slots:
        buffer = TensorMeta("w2", "float32", (len(row), 3, 2))
        segments, copies = [Segment.whole(NORM)], [(0, 1)]
        for slot, expert in enumerate(row):
            box = Box((expert, 0, 0), (1, 3, 2))
            segments.append(Segment(STACK.name, box, "w2", slot * 24, (24, 8, 4)))
            copies.append((seen[expert], flat.count(expert)))
            seen[expert] += 1
        where = Arrangement("key", tuple(copies))
        made.append(RankLayout((STACK, NORM), tuple(segments), buffers=(buffer, NORM), arrangement=where))
    return made


def summed(slots: list[list[int]], flipped: tuple[int, int] | None = None) -> tuple[Digests, Digests]:
    """Return the engine's digests, a row per rank, and the trainer's. `flipped`: rank and slot of a fault."""
    stack, norm = torch.randn(STACK.shape), torch.randn(NORM.shape)
    ranks = layouts(slots)
    source = RankLayout((STACK, NORM), (Segment.whole(STACK), Segment.whole(NORM)))
    members = Members(3, (0,), (("e", (1, 2)),))
    plan = make_plan(
        Layout.from_ranks([source]),
        {"e": Layout.from_ranks(ranks)},
        members,
        bucket_bytes=1 << 10,
        max_staging_bytes=1 << 12,
    )
    shares = []
    for rank, (row, layout) in enumerate(zip(slots, ranks, strict=True)):
        live = {"w2": stack[row].clone(), "norm": norm.clone()}
        if flipped and flipped[0] == rank:
            live["w2"][flipped[1]].view(torch.uint8)[1, 3] ^= 1
        shares.append(LiveWriter(plan, layout, live, []).digests())
    tables = [LayoutTable.of(layout) for layout in ranks]
    assert [table.rank_layout() for table in tables] == ranks
    values = {STACK.name: stack, NORM.name: norm}
    wanted = [tensor_digest(values[meta.name], meta.shape) for meta in plan.tensors]
    return DigestReduction(plan, tables)(shares), np.array(wanted, np.uint64)


@pytest.mark.parametrize("slots", SLOTS)
def test_right_copies_have_the_trainers_digest(slots: list[list[int]]) -> None:
    found, wanted = summed(slots)
    assert (found == wanted).all()


@given(st.sampled_from(SLOTS), st.data())
def test_one_sum_finds_a_fault_in_any_copy(slots: list[list[int]], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 1))
    slot = data.draw(st.integers(0, len(slots[rank]) - 1))
    found, wanted = summed(slots, (rank, slot))
    wrong = (found != wanted).any(axis=0)
    assert wrong.sum() == 1


def test_ranks_with_the_same_boxes_and_other_copies_are_no_replicas() -> None:
    first, second = layouts(SLOTS[1])
    assert replace(first, arrangement=None) == replace(second, arrangement=None)
    assert LayoutTable.of(first).outline().key != LayoutTable.of(second).outline().key
