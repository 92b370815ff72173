"""Trains replicas of a plain module. DDP averages their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.backends.base import Backend, adamw, is_trained


class Plain(Backend):
    """One replica."""

    def __init__(self, model: nn.Module, loop: LoopSpec, device: str) -> None:
        del device  # the model is there
        self.model, self._module = model, DistributedDataParallel(model)
        self.optimizer = adamw(model, loop)

    @torch.no_grad()
    def scramble(self) -> None:
        """Replace all trained weights by random numbers, the same on all ranks."""
        for parameter in filter(is_trained, self.model.parameters()):
            dist.broadcast(parameter.normal_(std=0.02), src=0)
