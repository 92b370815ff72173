"""Adapters of experts for vLLM's slots that have gate and up projections together.

vLLM has such slots for models whose checkpoints stack experts. There is one A for both projections, and B's
rows of up follow B's rows of gate. vLLM reads an adapter for these slots from stacks of all experts, as PEFT
saves an adapter of parameters. Sources: ``FusedMoE3DWithLoRA`` and ``LoRAModelManager`` in vLLM's ``lora/``,
0.24 and 0.32.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weightsync.plan import RankLayout
from weightsync.protocol.adapters import LORA_A, is_of_expert

_PROJECTIONS = ("gate_proj", "down_proj", "up_proj")
_GATE, _UP = f".gate_proj{LORA_A}", f".up_proj{LORA_A}"


def is_of_stack(module: object) -> bool:
    """Return True if a layer of vLLM has slots for gate and up projections together."""
    return type(module).__name__ == "FusedMoE3DWithLoRA"


def stacked_names(path: str, module: Any) -> Sequence[str]:  # noqa: ANN401 - vLLM's
    """Return our names of the projections of all experts of the layer at `path`, expert by expert."""
    experts = range(module.global_num_experts)
    return [f"{path}.{expert}.{projection}" for expert in experts for projection in _PROJECTIONS]


def stack(manager: Any, loras: MutableMapping[str, Any]) -> None:  # noqa: ANN401 - vLLM's
    """Put stacks in place of the experts in `loras`, for each layer with such slots that an adapter is of.

    It is of all experts of a layer, with the same A for gate and up projections; see `require_experts`.
    """
    for path, module in manager.modules.items():
        if is_of_stack(module) and f"{path}.0.{_PROJECTIONS[0]}" in loras:
            each = [loras.pop(name) for name in stacked_names(path, module)]
            gates, downs, ups = (each[number::3] for number in range(3))
            pairs = zip(gates, ups, strict=True)
            both = [torch.cat([gate.lora_b, up.lora_b]) for gate, up in pairs]
            loras[f"{path}.base_layer"] = _joined(gates, both)
            loras[path] = _joined(downs, [down.lora_b for down in downs])


def _joined(experts: Sequence[Any], of_b: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - vLLM's
    """Return the first of `experts` with the A and B of all experts.

    A has the rows of one expert after another. B first has the columns for each expert's first row of A.
    """
    first = experts[0]
    first.lora_a = torch.cat([each.lora_a for each in experts])
    first.lora_b = torch.stack(tuple(of_b), dim=2).flatten(1)
    return first


def with_up_projections(layout: RankLayout) -> RankLayout:
    """Add the up projections' A to a slot's layout, at the place of the gate projections' A."""
    metas = (replace(each, name=up) for each in layout.tensors if (up := _of_up(each.name)))
    segments = (replace(each, tensor=up) for each in layout.segments if (up := _of_up(each.tensor)))
    return replace(layout, tensors=(*layout.tensors, *metas), segments=(*layout.segments, *segments))


def _of_up(name: str) -> str:
    """Return the name of the up projection's A for the name of an expert's gate projection, else ""."""
    return f"{name.removesuffix(_GATE)}{_UP}" if name.endswith(_GATE) and is_of_expert(name) else ""
