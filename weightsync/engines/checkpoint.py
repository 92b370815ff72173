"""The full-precision checkpoint of an engine's model, without its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weightsync.memory.tensors import meta_of, named_tensors
from weightsync.plan import TensorMeta
from weightsync.plan.segment import CASTABLE

FULL = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of full-precision checkpoints."""


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

    def as_held(self, model: torch.nn.Module) -> Checkpoint:
        """Return the checkpoint with floats in the dtypes that an engine's `model` holds under their names.

        Engines keep some in float32, such as routers, whatever their own dtype is.
        """
        held = {name: meta_of(name, each).dtype for name, each in named_tensors(model)[0].items()}

        def held_as(meta: TensorMeta) -> TensorMeta:
            dtype = held.get(meta.name, meta.dtype)
            return replace(meta, dtype=dtype) if {dtype, meta.dtype} <= CASTABLE else meta

        return replace(self, tensors=tuple(map(held_as, self.tensors)))


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
