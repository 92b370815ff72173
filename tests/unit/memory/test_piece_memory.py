"""Pieces in slots, read as tensors."""

from __future__ import annotations

import torch

from weightsync.plan import Layout, Members, RankLayout, Segment, TensorMeta, make_plan
from weightsync.quantising.piece_memory import SlotPieces


def test_a_tensor_in_one_slot_is_whole_if_all_its_rows_are_there() -> None:
    metas = TensorMeta("a", "float32", (48, 4)), TensorMeta("b", "float32", (8,))
    layout = Layout.from_ranks([RankLayout(metas, tuple(map(Segment.whole, metas)))])
    members = Members(num_holders=1, trainers=(0,), engines=(("e", (0,)),))
    plan = make_plan(
        layout, {"e": layout}, members, bucket_bytes=256, max_staging_bytes=1 << 20, slots=2, epoch=1
    )
    slots = [torch.zeros(plan.max_bucket_nbytes, dtype=torch.uint8) for _ in range(2)]
    pieces = SlotPieces(plan, slots)
    by_bucket = [[piece for piece in bucket.pieces if piece.tensor == 1] for bucket in plan.buckets()]
    (its,) = (found for found in by_bucket if found)
    whole = pieces.whole(its)
    assert whole is not None
    assert whole.shape == (8,)
    assert whole.data_ptr() == slots[its[0].bucket % 2].data_ptr() + its[0].offset
