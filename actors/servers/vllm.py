"""Has a ``vllm serve`` that Ray did not start join the driver as an engine.

vLLM loads it by its own option ``--middleware weightsync.JoinDriver``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weightsync.actors.servers.adapter_requests import pass_on
from weightsync.actors.servers.app import JoinsDriver, Scope
from weightsync.engines import Engine
from weightsync.engines.vllm.served import ServedVllm
from weightsync.errors import ConfigError


class JoinDriver(JoinsDriver):
    """An ASGI middleware that takes part in updates while vLLM's server runs. Passes all requests on."""

    _engine: ServedVllm | None = None

    async def _served(self, app: Any, loop: asyncio.AbstractEventLoop) -> tuple[Engine, int]:  # noqa: ANN401
        if (count := app.state.args.api_server_count or 1) > 1:
            raise ConfigError(
                "--api-server-count", count, "start one API server: each would join as an engine"
            )
        llm = app.state.engine_client
        self._engine = ServedVllm(llm, loop, app.state.openai_serving_models.lora_requests)
        if llm.vllm_config.load_config.load_format == "dummy":
            await self._engine.hold()
        return self._engine, app.state.args.port

    async def _answer(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        adapters_of = self._engine.adapters_of if self._engine else None
        if adapters_of and adapters_of(None) and scope.get("method") == "POST":
            await pass_on(self._app, scope, receive, send, adapters_of)
        else:
            await super()._answer(scope, receive, send)
