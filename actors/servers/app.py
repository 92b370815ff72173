"""A server that Ray did not start: it joins the driver as an engine, from within its web application."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

from weightsync.actors.engine_calls import EngineCalls, Methods
from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.door import check_address, check_token, server_url
from weightsync.actors.servers.peers import ServedEngine
from weightsync.actors.servers.process import JoinedProcess
from weightsync.engines import Engine
from weightsync.engines.rank.rank_host import RankHost
from weightsync.node.messages import Join, NodeOffer
from weightsync.node.node import Node
from weightsync.protocol.log_level import log_level, use_log_level

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]

_URL = "WEIGHTSYNC_URL"


class JoinedEngine(JoinedProcess, EngineCalls):
    """The engine of a server."""

    def __init__(self, engine: Engine, port: int, loop: asyncio.AbstractEventLoop) -> None:
        """
        Args:
            engine: its methods are called on other threads.
            port: where the server listens for requests.
            loop: on which coroutines of the engine run.
        """
        super().__init__()
        self._engine, self._port, self._loop = engine, port, loop

    @property
    def _title(self) -> str:
        return self._url if self._address else "server"

    @property
    def _url(self) -> str:
        return os.environ.get(_URL) or server_url(self._address, self._port)

    def _require_claim(self) -> None:
        """Its driver is the one that it has joined."""

    def _greeting(self) -> Join:
        return Join(self._url, self._process)

    def _new_node(self, offer: NodeOffer) -> Node:
        return Node(offer, Methods(self), ServedEngine, self._loop, self._process)

    def _here(self, slot: str) -> Placement:
        return self._placed(f"slot:{slot}")

    def _there(self, placement: Placement, at: RankHost) -> Placement:
        return super()._there(placement, replace(at, node=""))  # a Ray of the server's is not the driver's


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
        except Exception as error:
            # Without this message, uvicorn would start, and serve weights that no driver has sent.
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
