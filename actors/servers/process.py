"""The own part of a process that Ray did not start: it joins the driver, and starts holders' processes."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import threading
from abc import abstractmethod

import msgspec

from weightsync.actors.holders.weight_holder import holder_settings
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.versions import own_versions
from weightsync.actors.servers.door import TOKEN, driver_endpoint
from weightsync.config import Ports, SyncConfig, TlsFiles
from weightsync.node.messages import MAX_NBYTES, Join, Joined, JoinRank, NodeOffer, Place, Refused, joined
from weightsync.node.node import Node
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.host_id import host_id
from weightsync.protocol.stream import Stream

logger = logging.getLogger("weightsync.actors")

TLS = "WEIGHTSYNC_TLS"
_DIAL_S, AGAIN_S, PAUSE_S = 10.0, 10.0, 2.0


class JoinedProcess:
    """Joins the driver, and again after the driver or the connection is lost."""

    def __init__(self) -> None:
        self._address = self._trouble = ""
        self._process = secrets.token_hex(8)
        self._driver = driver_endpoint()
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._tls = TlsFiles.within(os.environ[TLS]) if os.environ.get(TLS) else None

    @property
    @abstractmethod
    def _title(self) -> str:
        """The process's name in its log."""

    @abstractmethod
    def _greeting(self) -> Join | JoinRank:
        """Return the message that names this process to the driver."""

    @abstractmethod
    def _new_node(self, offer: NodeOffer) -> Node:
        """Return the node that answers the driver's calls."""

    def _left(self, why: str) -> None:
        """Note that a driver calls this process no more."""

    def join(self) -> None:
        """Join the driver whose address is in ``WEIGHTSYNC_JOIN``, on a thread."""
        on_daemon(self._take_part, "weightsync-join")

    def leave(self) -> None:
        """Take part no more, and end the holders."""
        self._over.set()
        _end_all(self._holders)

    def _take_part(self) -> None:
        while not self._over.is_set():
            node, why = None, "it has let this process go"
            try:
                node = self._new_node(self._ask())
                logger.info("[%s] joins the driver at %s", self._title, self._driver)
                self._trouble = ""
                node.run(_DIAL_S, AGAIN_S)
                logger.info("[%s] the driver at %s has let it go", self._title, self._driver)
            except Exception as error:  # noqa: BLE001 - without this thread the process never joins
                self._waits(why := str(error))
            if node and node.welcomed.done() and not node.welcomed.exception():
                self._left(why)
            _end_all(self._holders)
            self._over.wait(PAUSE_S)

    def _waits(self, why: str) -> None:
        if why != self._trouble:  # a driver may come much later
            self._trouble = why
            logger.warning("[%s] waits for its driver at %s: %s", self._title, self._driver, why)

    def _ask(self) -> NodeOffer:
        """Ask the driver for a place, until it has one. Raises OSError if it does not answer."""
        stream = Stream(self._driver, os.environ.get(TOKEN, ""), MAX_NBYTES, _DIAL_S, self._tls)
        self._address = stream.own_address
        answer: Joined | None = None
        try:
            while not isinstance(answer, Place):
                if answer and self._over.wait(PAUSE_S):
                    raise ConnectionAbortedError("this process has left")
                stream.send(msgspec.msgpack.encode(self._greeting()))
                if (came := stream.receive(_DIAL_S)) is None:
                    raise TimeoutError("it does not answer")
                if isinstance(answer := joined(came), Refused):
                    self._waits(answer.why)
        except ConnectionResetError as error:
            if answer:
                raise
            raise ConnectionResetError(f"it hangs up: is {TOKEN} the same there?") from error
        finally:
            stream.close()
        return msgspec.structs.replace(answer.offer, tls=self._tls)

    def _placed(self, device: str) -> Placement:
        return Placement(host_id(), self._address, device, os.getpid(), own_versions())

    async def sync_start_holder(
        self,
        number: int,
        name: str,
        placement: Placement,
        transport: str,
        ports: Ports | None,
        offer: NodeOffer,
    ) -> None:
        """Start the process of a holder, which dials the driver by itself."""
        settings = holder_settings(name, placement, transport, SyncConfig(ports=ports, tls=self._tls))
        offer = msgspec.structs.replace(offer, tls=self._tls)
        visible = {"CUDA_VISIBLE_DEVICES": placement.gpu if transport == "nccl" else ""}
        child = subprocess.Popen(
            [sys.executable, "-m", "weightsync.actors.servers.holder_process"],
            stdin=subprocess.PIPE,
            env=os.environ | visible,
        )
        self._holders[number] = child
        assert child.stdin
        with child.stdin as orders:
            orders.write(msgspec.json.encode((os.getpid(), settings, offer)))

    async def sync_end_holder(self, number: int) -> None:
        """End the process of a holder, if there is one."""
        if child := self._holders.pop(number, None):
            child.kill()
            await asyncio.to_thread(child.wait)


def _end_all(holders: dict[int, subprocess.Popen[bytes]]) -> None:
    while holders:
        _, child = holders.popitem()
        child.kill()
        child.wait()
