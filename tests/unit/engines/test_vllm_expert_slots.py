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


class FusedMoE3DWithLoRA(FusedMoEWithLoRA): ...


def manager(module: object) -> Any:
    dense = SimpleNamespace(lora_a_stacked=(torch.zeros(2, 1, 4, 8),))
    return SimpleNamespace(modules={"q_proj": dense, PATH: module}, packed_modules={PATH: NAMES})


@pytest.mark.parametrize("module", [FusedMoEWithLoRA(), FusedMoEWithLoRA([-1, -1, 0, 1])])
def test_experts_in_order_are_taken(module: object) -> None:
    require_experts(manager(module), LORAS)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (FusedMoE3DWithLoRA(), rf"enable_mixed_moe_lora_format: False .* give true: {NAMES[0]}"),
        (FusedMoEWithLoRA(enable_moe_shared_loras=True), "enable_moe_shared_loras: True"),
        (FusedMoEWithLoRA([-1, -1, 0, 1], eplb=True), "enable_eplb: True"),
        (FusedMoEWithLoRA([-1, 0, -1, 1]), rf"enable_expert_parallel: True .* in order.* for {NAMES[0]}"),
        (FusedMoEWithLoRA([-1, -1, -1, 0], local_num_experts=1), "enable_expert_parallel: True"),
    ],
)
def test_others_are_refused_if_the_adapter_has_experts(module: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_experts(manager(module), LORAS)
    require_experts(manager(module), {"q_proj": LORAS[NAMES[0]]})
