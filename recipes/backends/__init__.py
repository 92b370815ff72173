"""What trains a policy's ranks: FSDP2, DeepSpeed ZeRO-3, Megatron-Core, or replicas of a plain module."""

from __future__ import annotations

import importlib

from torch import nn

from weightsync.recipes.backends.base import Backend
from weightsync.recipes.recipe import LoopSpec

__all__ = ["BACKENDS", "Backend", "make_backend"]

BACKENDS = {
    "fsdp2": "weightsync.recipes.backends.fsdp2:Fsdp2",
    "deepspeed": "weightsync.recipes.backends.deepspeed:DeepSpeed",
    "megatron": "weightsync.recipes.backends.megatron:Megatron",
    "plain": "weightsync.recipes.backends.plain:Plain",
}
"""The backend of each ``trainers.kind``, imported on use."""


def make_backend(kind: str, model: nn.Module, loop: LoopSpec, device: str) -> Backend:
    """Make the backend of `kind` for this rank. All ranks call it."""
    module, _, cls = BACKENDS[kind].partition(":")
    backend: Backend = getattr(importlib.import_module(module), cls)(model, loop, device)
    return backend
