"""The interface between the learner and the library that shards and trains the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from weightsync.recipes.config.recipe import LoopSpec
from weightsync.recipes.training.grpo import PromptGroup

MAX_GRAD_NORM = 1.0


class Backend(ABC):
    """One rank of a model in training. Every rank calls every method.

    Attributes:
        model: the model for `TrainerShard`.
        hf_config: the checkpoint's configuration, if the model does not name its tensors.
        optimizer: the optimiser. The learner's schedule sets the learning rate.
    """

    model: Any
    hf_config: Any = None
    optimizer: Optimizer
    _module: nn.Module
    """The module of a forward pass."""

    def share(self, groups: Sequence[PromptGroup]) -> Sequence[PromptGroup]:
        """Return the groups that this rank trains on, given the rank's share of a step's groups."""
        return groups

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float32[batch, length, vocabulary], for `tokens`, int64[batch, length]."""
        logits: Tensor = self._module(tokens, use_cache=False).logits
        return logits

    def descend(self, loss: Tensor) -> float:
        """Take one optimiser step. Returns the norm of the gradients before clipping."""
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    @abstractmethod
    def scramble(self) -> None:
        """Replace all trained weights by random numbers."""


def adamw(module: nn.Module, loop: LoopSpec) -> AdamW:
    """Return the optimiser of all backends."""
    return AdamW(
        filter(is_trained, module.parameters()), lr=loop.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )


def is_trained(parameter: Tensor) -> bool:
    """Return True if a parameter is trained. With an adapter, only the adapter's parameters are."""
    return parameter.requires_grad
