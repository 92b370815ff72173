"""An engine's model without the layers that LoRA wraps around the model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PREFIX = "lora_base_layer_prefix"
"""An attribute of vLLM's experts from 0.32 on: the prefix in names of wrapped layers."""


def is_lora(module: torch.nn.Module) -> bool:
    """Return True if a module is a layer of vLLM or SGLang that LoRA wraps around another one."""
    return type(module).__name__.endswith("WithLoRA")


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Remove LoRA's layers from a model until the context ends, for the loader.

    Loaders then accept a checkpoint's names. With LoRA's layers, names depend on vLLM's version. vLLM 0.24
    and SGLang 0.5.17 have no names for experts, and skip experts silently. Parameters stay the same.
    """
    places = [
        (parent, name, child)
        for _, parent in model.named_modules()
        for name, child in parent.named_children()
        if is_lora(child) and hasattr(child, "base_layer")
    ]
    told = [(module, vars(module)[_PREFIX]) for module in model.modules() if _PREFIX in vars(module)]
    try:
        for parent, name, child in places:
            inner: Any = child.base_layer
            setattr(parent, name, inner)
        for module, _ in told:
            setattr(module, _PREFIX, "")
        yield
    finally:
        for parent, name, child in places:
            setattr(parent, name, child)
        for module, prefix in told:
            setattr(module, _PREFIX, prefix)
