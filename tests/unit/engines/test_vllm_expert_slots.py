"""Which layers of vLLM have slots for adapters of experts, with fakes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.engines.vllm.expert_slots import require_experts
from weightsync.errors import ConfigError

PATH = "layers.0.mlp.experts"
NAMES = [f"{PATH}.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "down", "up")]
LORAS = {name: SimpleNamespace(lora_a=torch.zeros(2, 8)) for name in NAMES}


class FusedMoEWithLoRA:
    """The second of two ranks, as vLLM lays them out."""

    def __init__(self, held: list[int] | None = None, eplb: bool = False, **more: object) -> None:
        self.w13_lora_a_stacked = (torch.zeros(2, 2, 4, 8),) * 2
        self.use_ep, self.ep_rank, self.local_num_experts = held is not None, 1, 2
        places = None if held is None else torch.tensor(held)
        self.base_layer = SimpleNamespace(routed_experts=SimpleNamespace(expert_map=places))
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=eplb))
        self.__dict__.update(more)


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    """Has one A for gate and up projections."""

    global_num_experts, _base_model = 4, "Qwen3VLMoeForConditionalGeneration"

    def __init__(self, held: list[int] | None = None, **more: object) -> None:
        super().__init__(held, **more)  # type: ignore[arg-type]
        self.w13_lora_a_stacked = self.w13_lora_a_stacked[:1]


def manager(module: object) -> Any:
    dense = SimpleNamespace(lora_a_stacked=(torch.zeros(2, 1, 4, 8),))
    return SimpleNamespace(modules={"q_proj": dense, PATH: module}, packed_modules={PATH: NAMES})


@pytest.mark.parametrize("module", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
@pytest.mark.parametrize("held", [None, [-1, -1, 0, 1]])
def test_experts_in_order_are_taken(module: Any, held: list[int] | None) -> None:
    require_experts(manager(module(held)), LORAS, shares_a=module is FusedMoE3DWithLoRA)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (FusedMoE3DWithLoRA(), rf"enable_mixed_moe_lora_format: False .* of {PATH}\.0 have an A each"),
        (FusedMoEWithLoRA(enable_moe_shared_loras=True), "enable_moe_shared_loras: True"),
        (FusedMoEWithLoRA([-1, -1, 0, 1], eplb=True), "enable_eplb: True"),
        (FusedMoEWithLoRA([-1, 0, -1, 1]), rf"enable_expert_parallel: True .* in order.* for {NAMES[0]}"),
        (FusedMoEWithLoRA([-1, -1, -1, 0], local_num_experts=1), "enable_expert_parallel: True"),
    ],
)
def test_others_are_refused_if_the_adapter_has_experts(module: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_experts(manager(module), LORAS, shares_a=False)
    require_experts(manager(module), {"q_proj": LORAS[NAMES[0]]}, shares_a=False)


@pytest.mark.parametrize(
    ("module", "loras", "says"),
    [
        (FusedMoE3DWithLoRA(_base_model="GptOssForCausalLM"), LORAS, rf"leave {NAMES[0]} out: .* in turns"),
        (FusedMoE3DWithLoRA([-1, 0, -1, 1]), LORAS, "enable_expert_parallel: True"),
        (FusedMoE3DWithLoRA(global_num_experts=5), LORAS, r"experts\.4\.gate_proj'.* adapt it, too"),
        (FusedMoE3DWithLoRA(global_num_experts=3), LORAS, rf"experts\.3\.gate_proj'.* slots for {NAMES[0]}"),
        (
            FusedMoE3DWithLoRA(),
            {n: LORAS[n] for n in NAMES if ".up_" not in n},
            r"0\.up_proj'.* adapt it, too",
        ),
    ],
)
def test_experts_that_share_a_are_refused_where_stacks_would_be_read_otherwise(
    module: object, loras: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        require_experts(manager(module), loras, shares_a=True)
