"""Looks into the slots of a vLLM that balances experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

__all__ = ["rank_of_experts", "wrong_slots"]


def rank_of_experts() -> int:
    from vllm.distributed.parallel_state import get_ep_group

    return int(get_ep_group().rank_in_group)


def wrong_slots(model: Any, experts: list[list[int]], checkpoint: str) -> list[str]:
    """Name each slot of this rank that does not have its expert's bytes of a checkpoint, bit for bit.

    `experts`: the expert in each slot of all ranks, by layer, as vLLM's router has it.
    """
    wrong, seen = [], 0
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as saved:
        for path, module in model.named_modules():
            if "w13_weight" not in dict(module.named_parameters(recurse=False)):
                continue
            layer = int(path.split(".layers.")[1].split(".")[0])
            both, down = module.w13_weight, module.w2_weight
            first = rank_of_experts() * len(both)
            for slot in range(len(both)):
                expert = experts[layer][first + slot]
                base = f"model.layers.{layer}.mlp.experts.{expert}"
                parts = [saved.get_tensor(f"{base}.{name}_proj.weight") for name in ("gate", "up", "down")]
                same = torch.equal(both[slot].cpu(), torch.cat(parts[:2])) and torch.equal(
                    down[slot].cpu(), parts[2]
                )
                wrong += [] if same else [f"layer {layer}, slot {first + slot}: not expert {expert}"]
                seen += 1
    assert seen, "vLLM has no experts where this looks for them"
    return wrong
