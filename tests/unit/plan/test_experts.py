"""Single experts of some ranks, as parts of one stack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.balance import Stretch
from weightsync.plan.layout.experts import expert_parts, stack_experts, stack_name, stacked


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


@pytest.mark.parametrize(
    ("leaves", "stacks"),
    [
        (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")),
        (("w1", "w3", "w2"), ("w1_w3", "w2")),
        (("up_proj", "down_proj"), ("up_proj", "down_proj")),
    ],
)
def test_files_and_ranks_stack_what_loaders_get_one_by_one(
    leaves: tuple[str, ...], stacks: tuple[str, str]
) -> None:
    *inner, outer = leaves
    shapes = {leaf: (4, 3) if leaf == outer else (3, 4) for leaf in leaves}
    metas = [
        TensorMeta(f"moe.experts.{number}.{leaf}.weight", "int32", shape)
        for number in range(2)
        for leaf, shape in shapes.items()
    ]
    whole = [Stretch(meta.name, Box.whole(meta.shape), meta.itemsize, 0, 0) for meta in metas]
    names = [f"moe.experts.{stack}" for stack in stacks]
    wanted = dict(zip(names, [(2, 3 * len(inner), 4), (2, 4, 3)], strict=True))
    tensors, stretches = stacked(metas, whole)
    layout = stack_experts(RankLayout(tuple(metas), tuple(map(Segment.whole, metas))), 2)
    for found in (tensors, layout.tensors):
        assert {meta.name: meta.shape for meta in found} == wanted
    parts = {
        part: (name, box) for name, shape in wanted.items() for part, box in expert_parts(name, shape, wanted)
    }
    boxes = [(each.tensor, each.box) for each in stretches]
    assert boxes == [parts[meta.name] for meta in metas] == [(s.tensor, s.box) for s in layout.segments]
    assert stack_name(f"moe.experts.0.{inner[0]}.weight", inner) == names[0]
    assert stack_name(f"moe.experts.0.{outer}.weight", [outer]) == names[1]
    assert stack_name("moe.experts.0.w4.weight", ["w4"]) is None
    assert stacked(metas[1:], whole[1:])[0] == tuple(metas[1:]), "not all of a layer"


def test_a_part_of_an_expert_keeps_its_place_in_memory() -> None:
    meta = TensorMeta("mlp.experts.5.up_proj.weight", "bfloat16", (8, 4))
    cut = Segment(meta.name, Box((2, 0), (2, 4)), "fc1", 96, (8, 2))
    (found,) = stack_experts(RankLayout((meta,), (cut,)), 6).segments
    assert found.box == Box((5, 10, 0), (1, 2, 4))
    assert (found.buffer, found.byte_offset, found.strides[1:]) == ("fc1", 96, (8, 2))
