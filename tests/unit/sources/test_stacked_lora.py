"""Adapters of stacked experts, one by one, are what PEFT computes with."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.sources.test_lora import published
from weightsync.errors import ConfigError
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, Segment, TensorMeta
from weightsync.protocol.adapters import LORA_A, LORA_B
from weightsync.sources.lora.lora import LoraSource
from weightsync.sources.lora.stacked_lora import StackedExperts

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore:The following rank_pattern keys:RuntimeWarning"
)

EXPERTS, WIDE, HIDDEN = 3, 4, 6
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


class Experts(nn.Module):
    """As transformers has them. Twice `WIDE` differs from `HIDDEN`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * WIDE, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, WIDE))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, 2, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()


def stacked(parameters: list[str] = STACKS, **settings: Any) -> tuple[nn.Module, Model]:
    base = Model()
    config = {"r": 2, "lora_alpha": 5, "target_modules": ["router"], **settings}
    model = peft.get_peft_model(base, peft.LoraConfig(target_parameters=parameters, **config))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    return model, base


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"rank_pattern": {"down_proj": 3}}])
@pytest.mark.parametrize("parameters", [STACKS, STACKS[::-1]])
def test_each_experts_a_and_b_give_what_peft_adds_to_it(
    settings: dict[str, Any], parameters: list[str]
) -> None:
    model, _ = stacked(parameters, **settings)
    found = published(LoraSource(model, "default"))
    added = {
        module.parameter_name: module.get_delta_weight("default")
        for module in model.modules()
        if hasattr(module, "parameter_name")
    }
    spec = LoraSource(model, "default").spec("math")
    names = {meta.name for meta in spec.tensors}
    assert names == found.keys()
    assert spec.shares_a
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len(names) == 2 * (1 + 3 * EXPERTS)
    for expert in range(EXPERTS):
        change = {
            part: found[f"experts.{expert}.{part}{LORA_B}"] @ found[f"experts.{expert}.{part}{LORA_A}"]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat([change["gate_proj"], change["up_proj"]])
        torch.testing.assert_close(both, added["gate_up_proj"][expert])
        of_gate, of_up = (found[f"experts.{expert}.{part}{LORA_A}"] for part in ("gate_proj", "up_proj"))
        assert torch.equal(of_gate, of_up)
        torch.testing.assert_close(change["down_proj"], added["down_proj"][expert])


def test_parameters_that_are_no_experts_weights_are_refused() -> None:
    for parameters in (["router.weight"], ["experts.bias"]):
        model, _ = stacked(parameters, target_modules=[])
        with pytest.raises(ConfigError, match=f"target_parameters: '{parameters[0]}' .* leave it out"):
            LoraSource(model, "default").spec("math")


def test_transposed_experts_are_refused() -> None:
    base = Model()
    base.experts.is_transposed = True
    model = peft.get_peft_model(base, peft.LoraConfig(target_parameters=STACKS, target_modules=[]))
    with pytest.raises(ConfigError, match=r"experts.down_proj' .* read as \[experts, outputs, inputs\]"):
        LoraSource(model, "default").spec("math")


@given(data=st.data())
def test_ranks_that_have_some_rows_hold_all_of_each_expert_together(data: st.DataObject) -> None:
    count, rank, inputs, outputs = (data.draw(st.integers(1, 4)) for _ in range(4))
    experts = StackedExperts("experts", "gate_up_proj", count)
    suffix = data.draw(st.sampled_from([LORA_A, LORA_B]))
    shape = (count * rank, inputs) if suffix == LORA_A else (2 * outputs, rank * count)
    whole = torch.randperm(shape[0] * shape[1]).float().view(shape)
    meta = TensorMeta(f"experts.gate_up_proj{suffix}", "float32", shape)
    cuts = sorted({0, shape[0], *data.draw(st.lists(st.integers(0, shape[0]), max_size=3))})
    parts = {each.name: torch.full(each.shape, -1.0) for each in experts.metas(meta, suffix)}
    for top, end in itertools.pairwise(cuts):
        held = experts.by_expert(whole[top:end], suffix).clone(memory_format=torch.contiguous_format)
        box = Segment(meta.name, Box((top, 0), (end - top, shape[1])), "held", 0, ())
        for segment in experts.segments(meta, box, suffix):
            target = parts[segment.tensor][segment.box.slices()]
            assert target.eq(-1).all(), "no element twice"
            target.copy_(segment_view(held, segment))
    for expert in range(count):
        for number, part in enumerate(("gate_proj", "up_proj")):
            if suffix == LORA_A:
                wanted = whole[expert * rank : (expert + 1) * rank]
            else:
                wanted = whole[number * outputs : (number + 1) * outputs, expert::count]
            assert torch.equal(parts[f"experts.{expert}.{part}{suffix}"], wanted)


def test_some_columns_of_b_are_refused() -> None:
    experts = StackedExperts("experts", "down_proj", 2)
    meta = TensorMeta(f"experts.down_proj{LORA_B}", "float32", (3, 8))
    some = Segment(meta.name, Box((0, 4), (3, 4)), "held", 0, ())
    with pytest.raises(ConfigError, match=r"columns 4 to 8.* shard experts.down_proj.lora_B.weight by rows"):
        list(experts.segments(meta, some, LORA_B))
