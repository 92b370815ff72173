"""A server's own part: it joins the driver as an engine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from weightsync.actors.engine_calls import EngineCalls, Methods
from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.door import server_url
from weightsync.actors.servers.peers import ServedEngine
from weightsync.actors.servers.process import JoinedProcess
from weightsync.engines import Engine
from weightsync.engines.rank.rank_host import RankHost
from weightsync.node.messages import Join, NodeOffer
from weightsync.node.node import Node

URL = "WEIGHTSYNC_URL"


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
        return os.environ.get(URL) or server_url(self._address, self._port)

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
