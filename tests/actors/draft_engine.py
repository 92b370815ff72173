"""A vLLM with a draft, whose process and draft tests reach."""

from __future__ import annotations

import asyncio
import os

import torch

from weightsync import EngineActor


class DraftEngine(EngineActor):
    async def pid(self) -> int:
        return os.getpid()

    async def accepted(self) -> tuple[int, int]:
        """How many tokens were drafted, and how many of them were accepted."""
        metrics = await asyncio.to_thread(self._engine.call, lambda engine: engine.get_metrics())
        values = {each.name: int(each.value) for each in metrics if hasattr(each, "value")}
        return values["vllm:spec_decode_num_draft_tokens"], values["vllm:spec_decode_num_accepted_tokens"]

    async def spoil(self) -> None:
        """Change one byte of the draft."""
        await asyncio.to_thread(self._engine.call, _spoil)


@torch.no_grad()
def _spoil(engine: object) -> None:
    runner = engine.model_executor.driver_worker.worker.model_runner
    runner.get_draft_model().model.norm.weight.view(torch.uint8)[0] ^= 1
