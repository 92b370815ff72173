"""An engine's model without the layers that LoRA wraps around its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PREFIX = "lora_base_layer_prefix"
"""From 0.32 on, vLLM's experts are told what their loader expects in the names of wrapped layers."""


def is_lora(module: torch.nn.Module) -> bool:
    """Whether a module is a layer of vLLM or SGLang that LoRA wraps around another one."""
    return type(module).__name__.endswith("WithLoRA")


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Have a model without LoRA's layers until the context ends, for its loader.

    Loaders then take a checkpoint's names. With the layers, names depend on vLLM's version. vLLM 0.24 and
    SGLang 0.5.17 have none for experts, and pass over them without a word. Parameters stay the same.
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
