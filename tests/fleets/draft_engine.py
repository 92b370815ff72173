"""A vLLM with a draft, for tests that kill its process or change the draft."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.contract.vllm_speculation import live_draft
from weightsync import EngineActor, VllmActor
from weightsync.engines.vllm.api import set_environment


class DraftEngine(EngineActor):
    async def pid(self) -> int:
        return os.getpid()

    async def live_draft(self) -> Mapping[str, torch.Tensor]:
        """Copy the draft that rank 0 serves, see `live_draft`."""
        return await asyncio.to_thread(self._engine.call, live_draft)

    async def spoil(self) -> None:
        """Change one byte of the draft."""
        await asyncio.to_thread(self._engine.call, _spoil)


@torch.no_grad()
def _spoil(engine: object) -> None:
    runner = engine.model_executor.driver_worker.worker.model_runner
    runner.get_draft_model().model.norm.weight.view(torch.uint8)[0] ^= 1


class OwnEngine(VllmActor):
    """An ``AsyncLLM`` that its user made with dummy weights and a draft."""

    def __init__(self, path: str, speculative: Mapping[str, Any]) -> None:
        set_environment()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=path,
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            worker_extension_cls="weightsync.WeightSyncWorker",
            speculative_config=dict(speculative),
        )
        self.llm = AsyncLLM.from_engine_args(arguments)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        tokens: list[int] = []
        async for output in self.llm.generate({"prompt_token_ids": [*prompt]}, params, "asked"):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def end(self) -> None:
        self.llm.shutdown()
