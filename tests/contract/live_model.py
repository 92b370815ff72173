"""All that a model computes with, and what a run of it says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import nn

__all__ = ["differing", "held", "logits_of"]


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy parameters, buffers and tensors that modules keep beside them, without constants of torch.fx."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        its = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, each in itertools.chain(vars(module).items(), *its):
            if isinstance(each, torch.Tensor) and not name.startswith(("kv_cache", "_tensor_constant")):
                found[f"{path}.{name}"] = each.detach().clone()
    return found


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of tensors whose bytes differ. Both have to have the same names."""
    assert one.keys() == other.keys()
    return [name for name, each in one.items() if not _same_bytes(each, other[name])]


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, shapes and bytes are equal; NaN equals NaN of the same bits."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(first, second)


def logits_of(model: nn.Module) -> list[torch.Tensor]:
    """Return a list that gets the logits of each of the model's steps."""
    made: list[torch.Tensor] = []
    (processor,) = (each for path, each in model.named_modules() if path.endswith("logits_processor"))
    processor.register_forward_hook(lambda *args: made.append(args[-1].clone()))
    return made
