"""Base class for a user's own actor around vLLM, whose weights WeightSync updates."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from weightsync.actors.engine_calls import EngineCalls
from weightsync.engines.vllm.adopted import AdoptedVllm


class VllmActor(EngineCalls):
    """Base class of an actor around your own vLLM. Set ``self.llm``, an ``AsyncLLM``::

        class Rollout(VllmActor):
            def __init__(self, ...):
                self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
                    ..., worker_extension_cls="weightsync.WeightSyncWorker"))

            async def generate(self, ...): ...

    Write your methods as coroutines: while one blocks, the engine is not updated and does not answer
    heartbeats. If an engine starts with its own weights, it serves them until the first update.
    """

    llm: Any

    @cached_property
    def _engine(self) -> AdoptedVllm:  # type: ignore[override]  # made on first use, by a coroutine
        return AdoptedVllm(self.llm, asyncio.get_running_loop())
