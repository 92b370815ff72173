"""Has a ``vllm serve`` that Ray did not start join the driver as an engine.

vLLM loads it by its own option ``--middleware weightsync.JoinDriver``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from weightsync.actors.servers.app import JoinsDriver
from weightsync.engines import Engine
from weightsync.engines.vllm.adopted import AdoptedVllm


class JoinDriver(JoinsDriver):
    """An ASGI middleware that takes part in updates while vLLM's server runs. Passes all requests on."""

    async def _served(self, app: Any, loop: asyncio.AbstractEventLoop) -> tuple[Engine, int]:  # noqa: ANN401
        llm = app.state.engine_client
        if llm.vllm_config.load_config.load_format == "dummy":
            await llm.pause_generation(mode="keep", clear_cache=True)  # requests wait for the first version
        return AdoptedVllm(llm, loop), app.state.args.port
