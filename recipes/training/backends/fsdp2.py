"""Trains with FSDP2: each tensor is sharded by rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.backends.base import Backend, adamw, is_trained


class Fsdp2(Backend):
    """One FSDP2 rank."""

    def __init__(self, model: nn.Module, loop: LoopSpec, device: str) -> None:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))
        for block in (*layers.children(), model):
            fully_shard(block, mesh=mesh)
        self.model = self._module = model
        self.optimizer = adamw(model, loop)

    @torch.no_grad()
    def scramble(self) -> None:
        """Replace all trained weights by random numbers."""
        for parameter in filter(is_trained, self._module.parameters()):
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_(std=0.02)
