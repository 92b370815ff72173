"""Experts one by one become the stacks that PEFT saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engines.vllm.expert_stacks import stack, with_up_projections
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.protocol.adapters import LORA_A, LORA_B
from weightsync.sources.lora.stacked_lora import StackedExperts

PATH = "layers.0.mlp.experts"


class FusedMoE3DWithLoRA:
    def __init__(self, num_experts: int) -> None:
        self.global_num_experts = num_experts


def one_by_one(parameter: str, count: int, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return A and B of each expert, as trainers send them."""
    experts, found = StackedExperts(PATH, parameter, count), {}
    for suffix, each in whole.items():
        meta = TensorMeta(f"{PATH}.{parameter}{suffix}", "float32", tuple(each.shape))
        held = experts.by_expert(each, suffix).contiguous().flatten()
        for part in experts.metas(meta, suffix):
            found[part.name] = torch.empty(part.shape)
        segment = Segment(meta.name, Box((0, 0), meta.shape), "held", 0, ())
        for piece in experts.segments(meta, segment, suffix):
            strides = [step // 4 for step in piece.strides]
            cut = held.as_strided(piece.box.extent, strides, piece.byte_offset // 4)
            found[piece.tensor][piece.box.slices()] = cut
    return found


def peft_stacks(draw: st.DataObject, count: int, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
    rank = draw.draw(st.integers(1, 4))
    return {LORA_A: torch.rand(count * rank, inputs), LORA_B: torch.rand(outputs, rank * count)}


@given(data=st.data(), count=st.integers(1, 4), hidden=st.integers(1, 4), wide=st.integers(1, 4))
def test_stacks_are_those_of_which_experts_are_parts(
    data: st.DataObject, count: int, hidden: int, wide: int
) -> None:
    both, down = peft_stacks(data, count, hidden, 2 * wide), peft_stacks(data, count, wide, hidden)
    parts = one_by_one("gate_up_proj", count, both) | one_by_one("down_proj", count, down)
    names = {name.removesuffix(LORA_A).removesuffix(LORA_B) for name in parts}
    loras: dict[str, Any] = {
        name: SimpleNamespace(lora_a=parts[name + LORA_A], lora_b=parts[name + LORA_B]) for name in names
    }
    loras["q_proj"] = other = SimpleNamespace()
    modules = {"q_proj": object(), PATH: FusedMoE3DWithLoRA(count), "layers.1.mlp.experts": object()}
    stack(SimpleNamespace(modules=modules), loras)
    assert loras.keys() == {"q_proj", PATH, f"{PATH}.base_layer"}
    assert loras["q_proj"] is other
    for name, wanted in ((f"{PATH}.base_layer", both), (PATH, down)):
        assert torch.equal(loras[name].lora_a, wanted[LORA_A])
        assert torch.equal(loras[name].lora_b, wanted[LORA_B])


def test_layers_that_an_adapter_is_not_of_stay_as_they_are() -> None:
    loras: dict[str, Any] = {"q_proj": SimpleNamespace()}
    stack(SimpleNamespace(modules={PATH: FusedMoE3DWithLoRA(2)}), loras)
    assert loras.keys() == {"q_proj"}


def test_up_projections_have_their_a_where_gate_projections_have_it() -> None:
    names = [f"{PATH}.3.gate_proj{LORA_A}", f"{PATH}.3.gate_proj{LORA_B}", f"layers.1.mlp.gate_proj{LORA_A}"]
    metas = tuple(TensorMeta(name, "bfloat16", (2, 4)) for name in names)
    segments = tuple(Segment(name, Box((0, 0), (2, 4)), "w13", 8, (16, 2)) for name in names)
    layout = with_up_projections(RankLayout(metas, segments))
    up = f"{PATH}.3.up_proj{LORA_A}"
    assert layout.tensors == (*metas, TensorMeta(up, "bfloat16", (2, 4)))
    assert layout.segments == (*segments, Segment(up, Box((0, 0), (2, 4)), "w13", 8, (16, 2)))
