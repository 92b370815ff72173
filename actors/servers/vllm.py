"""Has a ``vllm serve`` that Ray did not start join the driver as an engine.

vLLM loads it by its own option ``--middleware weightsync.JoinDriver``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightsync.actors.servers.door import check_address
from weightsync.actors.servers.engine import JoinedEngine
from weightsync.engines.vllm.adopted import AdoptedVllm

_Scope = MutableMapping[str, Any]
_App = Callable[[_Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]


class JoinDriver:
    """An ASGI middleware that takes part in updates while the application runs. Passes all requests on."""

    def __init__(self, app: _App) -> None:
        """Raises ConfigError if the environment does not say where the driver is."""
        check_address()
        self._app = app

    async def __call__(self, scope: _Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        state, loop = scope["app"].state, asyncio.get_running_loop()
        llm = state.engine_client
        if llm.vllm_config.load_config.load_format == "dummy":
            await llm.pause_generation(mode="keep", clear_cache=True)  # requests wait for the first version
        engine = JoinedEngine(AdoptedVllm(llm, loop), state.args.port, loop)
        engine.join()
        try:
            await self._app(scope, receive, send)
        finally:
            engine.leave()
