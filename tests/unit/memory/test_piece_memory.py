"""Pieces read where a trainer has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from weightsync.memory.piece_memory import SlotPieces, SourcePieces
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan

METAS = TensorMeta("a", "float32", (48, 4)), TensorMeta("b", "float32", (8,))
WHOLE = RankLayout(METAS, tuple(map(Segment.whole, METAS)))
FIRST, LATER = Box((0, 0), (16, 4)), Box((16, 0), (32, 4))


def plan_from(*sources: RankLayout) -> Plan:
    num = len(sources)
    return make_plan(
        Layout.from_ranks(sources),
        {"e": Layout.from_ranks([WHOLE])},
        Members(num_holders=num, trainers=tuple(range(num)), engines=(("e", (0,)),)),
        bucket_bytes=256,
        max_staging_bytes=1 << 20,
        slots=2,
        epoch=1,
    )


def memory() -> dict[str, torch.Tensor]:
    return {meta.name: torch.arange(meta.numel, dtype=torch.float32).view(torch.uint8) for meta in METAS}


def cut(*boxes: Box) -> RankLayout:
    """A rank that has `a` in parts, each contiguous, one after the other."""
    strides, start, parts = FIRST.strides(4), 0, list[Segment]()
    for box in boxes:
        parts.append(Segment("a", box, "a", start, strides))
        start += 4 * box.numel
    return replace(WHOLE, segments=(*parts, Segment.whole(METAS[1])))


def test_pieces_are_views_of_what_a_trainer_has() -> None:
    plan, held = plan_from(WHOLE), memory()
    pieces = SourcePieces.find(plan, WHOLE, held)
    assert pieces
    a = held["a"].view(torch.float32).view(48, 4)
    for bucket in plan.buckets():
        for piece in (piece for piece in bucket.pieces if piece.tensor == 0):
            view = pieces.view(piece)
            assert view.data_ptr() == a[piece.box.slices()].data_ptr()
            assert view.equal(a[piece.box.slices()])
    wholes = [pieces.whole([piece]) for bucket in plan.buckets() for piece in bucket.pieces]
    assert len(wholes) > 2
    assert [whole.tolist() for whole in wholes if whole is not None] == [
        held["b"].view(torch.float32).tolist()
    ]


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param([cut(FIRST), cut(LATER)], id="two trainers"),
        pytest.param([cut(FIRST, LATER)], id="parts"),
    ],
)
def test_a_trainer_that_has_not_all_is_not_read(sources: Sequence[RankLayout]) -> None:
    assert SourcePieces.find(plan_from(*sources), sources[0], memory()) is None


def test_what_a_trainer_has_in_another_dtype_is_not_read_in_place() -> None:
    other = RankLayout((replace(METAS[0], dtype="float64"), METAS[1]), WHOLE.segments)
    assert SourcePieces.find(plan_from(WHOLE), other, memory()) is None


def test_a_tensor_in_one_slot_is_whole_if_all_its_rows_are_there() -> None:
    plan = plan_from(WHOLE)
    slots = [torch.zeros(plan.max_bucket_nbytes, dtype=torch.uint8) for _ in range(2)]
    pieces = SlotPieces(plan, slots)
    by_bucket = [[piece for piece in bucket.pieces if piece.tensor == 1] for bucket in plan.buckets()]
    (its,) = (found for found in by_bucket if found)
    whole = pieces.whole(its)
    assert whole is not None
    assert whole.shape == (8,)
    assert whole.data_ptr() == slots[its[0].bucket % 2].data_ptr() + its[0].offset
