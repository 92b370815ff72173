"""Single experts of some ranks, as parts of one stack."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.experts import stack_experts


def rank_layout(experts: list[int], rows: int, columns: int) -> RankLayout:
    metas = [TensorMeta("norm", "int32", (columns,))]
    for number in experts:
        for leaf in ("gate", "up", "down"):
            shape = (columns, rows) if leaf == "down" else (rows, columns)
            metas.append(TensorMeta(f"mlp.experts.{number}.{leaf}_proj.weight", "int32", shape))
    return RankLayout(tuple(metas), tuple(Segment.whole(meta) for meta in metas))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_ranks_stack_what_they_hold(num_ranks: int, per_rank: int, rows: int, columns: int) -> None:
    num_experts = num_ranks * per_rank
    gate_up = np.full((num_experts, 2 * rows, columns), -1)
    down = np.full((num_experts, columns, rows), -1)
    held = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    for rank in range(num_ranks):
        mine = list(range(rank * per_rank, (rank + 1) * per_rank))
        found = stack_experts(rank_layout(mine, rows, columns), num_experts)
        assert {meta.name: meta.shape for meta in found.tensors} == {
            "norm": (columns,),
            **{name: stack.shape for name, stack in held.items()},
        }
        for segment in found.segments:
            if segment.tensor != "norm":
                leaf = ("gate", "up", "down").index(segment.buffer.split(".")[3].removesuffix("_proj"))
                target = held[segment.tensor][segment.box.slices()]
                assert (target == -1).all()
                target[:] = leaf
    assert (gate_up[:, :rows] == 0).all()
    assert (gate_up[:, rows:] == 1).all()
    assert (down == 2).all()


def test_a_part_of_an_expert_keeps_its_place_in_memory() -> None:
    meta = TensorMeta("mlp.experts.5.up_proj.weight", "bfloat16", (8, 4))
    cut = Segment(meta.name, Box((2, 0), (2, 4)), "fc1", 96, (8, 2))
    (found,) = stack_experts(RankLayout((meta,), (cut,)), 6).segments
    assert found.box == Box((5, 10, 0), (1, 2, 4))
    assert (found.buffer, found.byte_offset, found.strides[1:]) == ("fc1", 96, (8, 2))
