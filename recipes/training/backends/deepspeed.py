"""Trains with DeepSpeed ZeRO-3: each rank has an equal run of every parameter's elements."""

from __future__ import annotations

import os

import deepspeed
import torch
from torch import Tensor, nn

from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.backends.base import MAX_GRAD_NORM, Backend, adamw


class DeepSpeed(Backend):
    """One ZeRO-3 rank."""

    def __init__(self, model: nn.Module, loop: LoopSpec, device: str) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows an actor only one GPU
        if device == "cpu":
            # Compiling the collective in shared memory would take minutes.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.optimizer = adamw(model, loop)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_GRAD_NORM,
            "zero_optimization": {"stage": 3},
        }
        self.model, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)
        self._module = self.model

    def descend(self, loss: Tensor) -> float:
        """Take one optimiser step, as `Backend.descend` says."""
        self.model.backward(loss)
        self.model.step()
        return float(self.model.get_global_grad_norm())

    @torch.no_grad()
    def scramble(self) -> None:
        """Replace all weights by random numbers."""
        parameters = list(self.model.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter in parameters:
                parameter.normal_(std=0.02)
