"""Models with the names of Megatron-Core and of Transformer Engine, without either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

__all__ = ["Place", "model_of"]


@dataclass(frozen=True)
class Place:
    """A process group, as one rank sees it."""

    number: int = 0
    count: int = 1

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


class _Model(nn.Module):
    """Stands for a GPTModel."""

    def __init__(self, config: Any, groups: Mapping[str, Place], is_tied: bool) -> None:
        super().__init__()
        self.config = config
        self.pg_collection = SimpleNamespace(
            **{"tp": Place(), "ep": Place(), "expt_tp": Place(), "pp": Place(), **groups}
        )
        self.share_embeddings_and_output_weights = is_tied
        self.decoder = nn.Module()

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Any) -> None: ...


def model_of(
    parameters: Mapping[str, torch.Tensor],
    *,
    groups: Mapping[str, Place] | None = None,
    first_layer: int = 0,
    is_tied: bool = False,
    **settings: Any,
) -> nn.Module:
    """Make a model with these parameters, by Megatron's names, and settings of its configuration.

    `first_layer` is the number in the whole model, from 0, of the first of its layers.
    """
    defaults = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "num_moe_experts": None,
    }
    model = _Model(SimpleNamespace(**{**defaults, **settings}), groups or {}, is_tied)
    for name, tensor in parameters.items():
        module: Any = model
        *path, leaf = name.split(".")
        for number, part in enumerate(path):
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
                if number and path[number - 1] == "layers":
                    offset = first_layer if path[0] == "decoder" else 0
                    getattr(module, part).layer_number = int(part) + offset + 1
            module = getattr(module, part)
        if leaf == "expert_bias":
            module.register_buffer(leaf, tensor)
            module.register_buffer("local_tokens_per_expert", tensor.clone(), persistent=False)
        else:
            setattr(module, leaf, nn.Parameter(tensor))
    return model
