"""Backends for training: FSDP2, DeepSpeed ZeRO-3, Megatron-Core, or replicas of a plain module."""

from __future__ import annotations

import importlib

from torch import nn

from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.backends.base import Backend

__all__ = ["BACKENDS", "Backend", "make_backend"]

BACKENDS = {
    "fsdp2": "weightsync.recipes.training.backends.fsdp2:Fsdp2",
    "deepspeed": "weightsync.recipes.training.backends.deepspeed:DeepSpeed",
    "megatron": "weightsync.recipes.training.backends.megatron:Megatron",
    "plain": "weightsync.recipes.training.backends.plain:Plain",
}
"""The backend of each ``trainers.kind``, imported on use."""


def make_backend(kind: str, model: nn.Module, loop: LoopSpec, device: str) -> Backend:
    """Make the backend of `kind` for this rank. All ranks call it."""
    module, _, cls = BACKENDS[kind].partition(":")
    backend: Backend = getattr(importlib.import_module(module), cls)(model, loop, device)
    return backend
