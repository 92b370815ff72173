"""PEFT's adapters of stacked experts, as files of single experts, and what vLLM's slots have of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

__all__ = ["STACKED", "TARGETS", "Slot", "kinds_of_slots", "save_by_expert", "slot_in"]

TARGETS = ["q_proj", "o_proj"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""PEFT's ``target_parameters``."""

_OF_LAYERS = ("lora_a_stacked", "lora_b_stacked")
_OF_EXPERTS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
_PROJECTIONS = {".base_layer": ("gate_proj", "up_proj"), "": ("down_proj",)}
"""What PEFT's files have of experts, by what follows their name."""

Slot = Mapping[str, np.ndarray]
"""All matrices in one slot, as bytes, and whether experts are switched on, by names."""


def save_by_expert(model: nn.Module, folder: Path, rank: int) -> None:
    """Save an adapter as PEFT would if each expert were a module."""
    model.save_pretrained(str(folder))
    saved = load_file(folder / "adapter_model.safetensors")
    split = {name: each for name, each in saved.items() if ".experts." not in name}
    for layer in {name.split(".experts.")[0] for name in saved if ".experts." in name}:
        for inner, projections in _PROJECTIONS.items():
            a, b = (saved[f"{layer}.experts{inner}.lora_{kind}.weight"] for kind in "AB")
            count = a.shape[0] // rank
            for expert in range(count):
                rows = torch.stack([a[expert * rank + at] for at in range(rank)])
                columns = torch.stack([b[:, at * count + expert] for at in range(rank)], dim=1)
                for projection, part in zip(projections, columns.chunk(len(projections)), strict=True):
                    module = f"{layer}.experts.{expert}.{projection}"
                    split[f"{module}.lora_A.weight"] = rows.clone()
                    split[f"{module}.lora_B.weight"] = part.contiguous()
    save_file(split, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    targets = [*TARGETS, *(each for both in _PROJECTIONS.values() for each in both)]
    config |= {"target_parameters": None, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def slot_in(worker: Any, number: int) -> Slot:
    """Return all that a worker of vLLM has in the slot of an adapter."""
    manager = worker.model_runner.get_model().lora_manager
    at = manager.lora_index_to_id.index(number)
    found = {}
    for path, module in manager.modules.items():
        experts = hasattr(module, "adapter_enabled")
        for kind in _OF_EXPERTS if experts else _OF_LAYERS:
            for part, stack in enumerate(getattr(module, kind, ())):
                if stack.dim() == 4:  # an embedding has others, and no adapter here
                    found[f"{path}.{kind}.{part}"] = _bytes(stack[at])
        if experts:
            found[f"{path}.enabled"] = _bytes(module.adapter_enabled[at : at + 1])
    return found


def kinds_of_slots(worker: Any) -> set[str]:
    """Return the names of the classes with which a worker of vLLM has slots for adapters of experts."""
    modules = worker.model_runner.get_model().lora_manager.modules.values()
    return {type(each).__name__ for each in modules if hasattr(each, "w13_lora_a_stacked")}


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().copy()
