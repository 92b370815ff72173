"""A server's own part: it joins the driver as an engine, and starts the processes of its holders."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading

import msgspec

from weightsync.actors.engine_calls import EngineCalls, Methods
from weightsync.actors.holders.weight_holder import holder_settings
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.versions import own_versions
from weightsync.actors.servers.door import JOIN, TOKEN, server_url
from weightsync.actors.servers.peers import ServedEngine
from weightsync.config import Ports, SyncConfig, TlsFiles
from weightsync.engines import Engine
from weightsync.errors import WeightSyncError
from weightsync.node.messages import MAX_NBYTES, Join, NodeOffer, Refused, joined
from weightsync.node.node import Node
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.host_id import host_id
from weightsync.protocol.routes import own_address
from weightsync.protocol.stream import Stream

logger = logging.getLogger("weightsync.actors")

URL, TLS = "WEIGHTSYNC_URL", "WEIGHTSYNC_TLS"
_DIAL_S, _AGAIN_S, _PAUSE_S = 10.0, 10.0, 2.0


class JoinedEngine(EngineCalls):
    """The engine of a server. Joins its driver, and again after the driver or the connection is lost."""

    def __init__(self, engine: Engine, port: int, loop: asyncio.AbstractEventLoop) -> None:
        """
        Args:
            engine: its methods are called on other threads.
            port: where the server listens for requests.
            loop: on which coroutines of the engine run.
        """
        self._engine, self._port, self._loop = engine, port, loop
        self._address = ""
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._tls = TlsFiles.within(os.environ[TLS]) if os.environ.get(TLS) else None

    def join(self) -> None:
        """Join the driver whose address is in ``WEIGHTSYNC_JOIN``, on a thread."""
        on_daemon(self._take_part, "weightsync-join")

    def leave(self) -> None:
        """Take part no more, and end the holders."""
        self._over.set()
        self._end_holders()

    def _take_part(self) -> None:
        endpoint, said = f"tcp://{os.environ[JOIN].rpartition('//')[2]}", ""
        while not self._over.is_set():
            try:
                offer = self._ask(endpoint)
                logger.info("[%s] joins the driver at %s", self._url, endpoint)
                said = ""
                node = Node(offer, Methods(self), ServedEngine, self._loop)
                node.run(_DIAL_S, _AGAIN_S)
                logger.info("[%s] the driver at %s has let it go", self._url, endpoint)
            except (OSError, WeightSyncError) as error:
                if str(error) != said:  # a driver may come much later
                    said = str(error)
                    logger.warning("[server] waits for its driver at %s: %s", endpoint, said)
            self._end_holders()
            self._over.wait(_PAUSE_S)

    def _ask(self, endpoint: str) -> NodeOffer:
        """Ask the driver for a place. Raises OSError if it does not answer or has none."""
        self._address = own_address(endpoint)
        stream = Stream(endpoint, os.environ.get(TOKEN, ""), MAX_NBYTES, _DIAL_S, self._tls)
        try:
            stream.send(msgspec.msgpack.encode(Join(self._url)))
            if (came := stream.receive(_DIAL_S)) is None:
                raise TimeoutError("it does not answer")
        except ConnectionResetError as error:
            raise ConnectionResetError(f"it hangs up: is {TOKEN} the same there?") from error
        finally:
            stream.close()
        answer = joined(came)
        if isinstance(answer, Refused):
            raise ConnectionRefusedError(answer.why)
        return msgspec.structs.replace(answer.offer, tls=self._tls)

    @property
    def _url(self) -> str:
        return os.environ.get(URL) or server_url(self._address, self._port)

    def _place(self, device: str, rank: int) -> Placement:
        slot = f"pid-{os.getpid()}" + (f".{rank}" if rank else "")
        return Placement(host_id(), self._address, device or f"slot:{slot}", os.getpid(), own_versions())

    async def sync_start_holder(
        self, name: str, placement: Placement, transport: str, ports: Ports | None, offer: NodeOffer
    ) -> None:
        """Start the process of a holder, which dials the driver by itself."""
        await self.sync_end_holder(name)
        settings = holder_settings(name, placement, transport, SyncConfig(ports=ports, tls=self._tls))
        offer = msgspec.structs.replace(offer, tls=self._tls)
        visible = {"CUDA_VISIBLE_DEVICES": placement.gpu if transport == "nccl" else ""}
        child = subprocess.Popen(
            [sys.executable, "-m", "weightsync.actors.servers.holder_process"],
            stdin=subprocess.PIPE,
            env=os.environ | visible,
        )
        self._holders[name] = child
        assert child.stdin
        with child.stdin as orders:
            orders.write(msgspec.json.encode((os.getpid(), settings, offer)))

    async def sync_end_holder(self, name: str) -> None:
        """End the process of a holder, if there is one."""
        if child := self._holders.pop(name, None):
            child.kill()
            await asyncio.to_thread(child.wait)

    def _end_holders(self) -> None:
        while self._holders:
            _, child = self._holders.popitem()
            child.kill()
            child.wait()
