"""Has a server that Ray did not start join the driver as an engine, from within its web application."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightsync.actors.servers.door import check_address, check_token
from weightsync.actors.servers.engine import JoinedEngine
from weightsync.engines import Engine
from weightsync.protocol.log_level import log_level, use_log_level

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]


class JoinsDriver(ABC):
    """An ASGI middleware that takes part in updates while the application runs. Passes all requests on."""

    def __init__(self, app: App) -> None:
        self._app = app

    @abstractmethod
    async def _served(self, app: Any, loop: asyncio.AbstractEventLoop) -> tuple[Engine, int]:  # noqa: ANN401
        """Return the engine of the application `app`, and the port where the server listens."""

    async def _answer(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await self._app(scope, receive, send)

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "lifespan":
            await self._answer(scope, receive, send)
            return
        try:
            engine = await self._joined(scope["app"])
        except BaseException as error:  # the server would start all the same, and serve weights of nobody
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        try:
            await self._app(scope, receive, send)
        finally:
            engine.leave()

    async def _joined(self, app: Any) -> JoinedEngine:  # noqa: ANN401
        """Have the application's engine join. Raises ConfigError if it cannot, or knows no driver."""
        check_address()
        check_token()
        use_log_level(log_level() or "WARNING")  # vLLM's server raises the root logger's level to ERROR
        loop = asyncio.get_running_loop()
        engine = JoinedEngine(*await self._served(app, loop), loop)
        engine.join()
        return engine
