"""A trainer of a model and of a draft on one GPU, and a vLLM that speculates with the draft."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from tests.gpu.vllm_probe import OPTIONS
from weightsync.actors.engine import EngineActor
from weightsync.actors.trainer_shard import TrainerShard


class DraftTrainer(TrainerShard):
    """One rank, in bfloat16. For equal seeds, its draft equals its model."""

    def start(self, path: str) -> None:
        """Read both from one checkpoint."""
        from transformers import AutoModelForCausalLM

        self.model, self.draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda() for _ in range(2)
        )

    @torch.no_grad()
    def train(self, part: str, seed: int) -> None:
        """Give the model, or the draft, other weights."""
        draw = torch.Generator(device="cuda").manual_seed(seed)
        for name, each in getattr(self, part).named_parameters():
            if "norm" not in name:
                scale = 0.02 if "embed" in name else 2 * each.shape[-1] ** -0.5
                each.copy_(torch.randn(each.shape, generator=draw, device="cuda") * scale)

    def weights(self, part: str) -> Mapping[str, torch.Tensor]:
        """Copy the weights of the model, or of the draft, to the host."""
        return {name: each.detach().cpu() for name, each in getattr(self, part).named_parameters()}


class DraftEngine(EngineActor):
    """A vLLM with CUDA graphs, started with dummy weights. Its draft is a model of its own."""

    def __init__(self, path: str, name: str) -> None:
        speculative = {"method": "draft_model", "model": path, "num_speculative_tokens": 2}
        options = {**OPTIONS, "speculative_config": speculative, "disable_log_stats": False}
        super().__init__("vllm", path, name, options)

    async def accepted(self) -> tuple[int, int]:
        """Return how many tokens were drafted, and how many of them were accepted."""
        metrics = await asyncio.to_thread(self._engine.call, lambda engine: engine.get_metrics())
        values = {each.name: int(each.value) for each in metrics if hasattr(each, "value")}
        return values["vllm:spec_decode_num_draft_tokens"], values["vllm:spec_decode_num_accepted_tokens"]

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy what the draft's kernels read."""
        return (await asyncio.to_thread(self._engine.call, lambda llm: llm.collective_rpc(_live)))[0]


def _live(worker: Any) -> dict[str, torch.Tensor]:
    runner = worker.model_runner
    draft = runner.get_draft_model() if hasattr(runner, "get_draft_model") else runner.drafter.model
    return {name: each.detach().cpu().clone() for name, each in draft.named_parameters()}
