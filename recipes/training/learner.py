"""One rank of the policy with an optimiser, on CPUs or GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from weightsync.recipes.config.recipe import LoopSpec, LoraSpec, TrainerSpec
from weightsync.recipes.training.backends import make_backend
from weightsync.recipes.training.grpo import (
    Batch,
    PromptGroup,
    collate,
    distillation_loss,
    mismatch,
    policy_loss,
    token_logprobs,
)
from weightsync.recipes.training.task import PAD, WORDS


class Learner:
    """Trains one rank's share of each step's groups. Every rank must call every method.

    Gradients are averaged, so equal shares on n ranks are one step on all the groups.

    Needs ``torch.distributed`` initialised.

    Attributes:
        model, draft, hf_config: attributes for `TrainerShard`. The draft is None without `draft_path`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        loop: LoopSpec,
        spec: TrainerSpec,
        device: str = "cpu",
        draft_path: str = "",
    ) -> None:
        self.loop, self._device = loop, device
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        if spec.lora:
            model = _adapted(model, spec.lora, loop.seed)
        self._backend = make_backend(spec.kind, model.to(device), loop, device)
        self.model, self.hf_config = self._backend.model, self._backend.hf_config
        self._draft_backend, self.draft = None, None
        if draft_path:
            draft = AutoModelForCausalLM.from_pretrained(draft_path, dtype=torch.float32)
            self._draft_backend = make_backend(spec.kind, draft.to(device), loop, device)
            self.draft = self._draft_backend.model
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._backend.optimizer, start_factor=1.0, end_factor=0.0, total_iters=loop.steps
        )

    def train_step(self, groups: Sequence[PromptGroup]) -> dict[str, float]:
        """Take ``loop.epochs`` optimiser steps on this rank's groups.

        Returns ``loss``, ``grad_norm`` and, before the first step, `mismatch`. Groups without an engine's
        log-probabilities must have been sampled with the current weights.
        """
        batch = collate(self._backend.share(groups), pad=WORDS.index(PAD)).to(self._device)
        first: Tensor | None = None
        for _ in range(self.loop.epochs):
            new = self._logprobs(batch.tokens)
            first = new.detach() if first is None else first
            old = first if batch.logprobs is None else batch.logprobs
            loss = policy_loss(new, old, batch, self.loop.clip)
            grad_norm = self._backend.descend(loss)
        assert first is not None
        self._schedule.step()
        self._distil(batch)
        return {"loss": loss.item(), "grad_norm": grad_norm, **mismatch(first, batch)}

    def _distil(self, batch: Batch) -> None:
        """Teach the draft, if there is one, to predict the model's tokens."""
        if not self._draft_backend:
            return
        with torch.no_grad():
            target = self._backend.forward(batch.tokens)
        for _ in range(self.loop.epochs):
            logits = self._draft_backend.forward(batch.tokens)
            loss = distillation_loss(logits, target, batch.mask, self.loop.temperature)
            self._draft_backend.descend(loss)

    def scramble(self) -> None:
        """Replace all weights by random numbers."""
        self._backend.scramble()
        if self._draft_backend:
            self._draft_backend.scramble()

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the `num_tokens` greedy tokens after each prompt, by the weights of all ranks.

        Prompts of one length go through the model together.
        """
        found: dict[int, list[int]] = {}
        for length in sorted({len(prompt) for prompt in prompts}):
            numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            answers = self._complete([list(prompts[number]) for number in numbers], num_tokens)
            found.update(zip(numbers, answers, strict=True))
        return [found[number] for number in range(len(prompts))]

    def _complete(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        tokens = torch.tensor(prompts, device=self._device)
        for _ in range(num_tokens):
            logits = self._backend.forward(tokens)
            tokens = torch.cat([tokens, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
        return tokens[:, len(prompts[0]) :].tolist()

    def _logprobs(self, tokens: Tensor) -> Tensor:
        return token_logprobs(self._backend.forward(tokens), tokens)


def _adapted(model: PreTrainedModel, lora: LoraSpec, seed: int) -> nn.Module:
    """Return `model` with an adapter that changes nothing yet. Only the adapter will be trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)
