"""The full-precision checkpoint of an engine's model, without its bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.memory.tensors import meta_of, named_tensors
from weightsync.plan import TensorMeta


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of the full-precision checkpoint of a model, without their bytes.

    Attributes:
        tied: its (alias, canonical) names.
        linears: weights of linear layers, which an engine's own checkpoint may have quantised.
        converts, stored: what the engine makes of the tensors, see `RankLayout`.
    """

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]
    linears: frozenset[str]
    converts: str = ""
    stored: tuple[TensorMeta, ...] = ()


def checkpoint_of(hf_config: object, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint of transformers' model of a config, whose names trainers use."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    tensors, tied = named_tensors(model)
    linears = frozenset(
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    )
    return Checkpoint(tuple(meta_of(name, tensor) for name, tensor in tensors.items()), tied, linears)
