"""One shard of the policy and its optimiser, with FSDP2 on CPUs or GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from weightsync.recipes.grpo import Group, collate, policy_loss, token_logprobs
from weightsync.recipes.recipe import LoopSpec
from weightsync.recipes.task import PAD, WORDS

__all__ = ["Learner"]


class Learner:
    """Trains one rank's share of each step's groups. Every rank must call every method.

    FSDP averages the gradients, so equal shares on n ranks are one step on all the groups.

    Needs ``torch.distributed`` initialised. Others may read `model`.
    """

    def __init__(self, model_path: str | os.PathLike[str], loop: LoopSpec, device: str = "cpu") -> None:
        self.loop, self._device = loop, device
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.model = _shard(model.to(device), device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=loop.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, start_factor=1.0, end_factor=0.0, total_iters=loop.steps
        )

    def train_step(self, groups: Sequence[Group]) -> dict[str, float]:
        """Take ``loop.epochs`` optimiser steps on this rank's groups. Returns ``loss`` and ``grad_norm``.

        The groups must have been sampled with the current weights.
        """
        batch = collate(groups, pad=WORDS.index(PAD)).to(self._device)
        old: Tensor | None = None
        for _ in range(self.loop.epochs):
            new = self._logprobs(batch.tokens)
            old = new.detach() if old is None else old
            loss = policy_loss(new, old, batch, self.loop.clip)
            grad_norm = self._descend(loss)
        self._schedule.step()
        return {"loss": loss.item(), "grad_norm": grad_norm}

    @torch.no_grad()
    def scramble(self) -> None:
        """Replace all weights by random numbers."""
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_(std=0.02)

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the `num_tokens` greedy tokens after each prompt, by the weights of all shards."""
        return [self._complete(list(prompt), num_tokens) for prompt in prompts]

    def _complete(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = torch.tensor([prompt], device=self._device)
        for _ in range(num_tokens):
            likeliest = self.model(tokens, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, likeliest], dim=1)
        return tokens[0, len(prompt) :].tolist()

    def _logprobs(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens, use_cache=False).logits
        return token_logprobs(logits, tokens, self.loop.temperature)

    def _descend(self, loss: Tensor) -> float:
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        assert isinstance(norm, DTensor)
        return norm.full_tensor().item()


def _shard(model: nn.Module, device: str) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in (*model.get_submodule("model.layers").children(), model):
        fully_shard(block, mesh=mesh)
    return model
