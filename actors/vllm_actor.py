"""An actor of one's own around a vLLM of one's own, whose weights WeightSync moves."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from weightsync.actors.engine_calls import EngineCalls
from weightsync.engines.vllm.adopted import AdoptedVllm

__all__ = ["VllmActor"]


class VllmActor(EngineCalls):
    """Derive your engine actor from it and set ``self.llm``, vLLM's ``AsyncLLM``::

        class Rollout(VllmActor):
            def __init__(self, ...):
                self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
                    ..., worker_extension_cls="weightsync.WeightSyncWorker"))

            async def generate(self, ...): ...

    Methods that you add are coroutines: one that blocks keeps the engine from being updated, and from
    saying that it is alive. Where it starts with weights of its own, it serves them until the first update.
    """

    llm: Any

    @cached_property
    def _engine(self) -> AdoptedVllm:  # type: ignore[override]  # made on first use, by a coroutine
        return AdoptedVllm(self.llm, asyncio.get_running_loop())
