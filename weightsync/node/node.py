"""A process's end: it dials its driver, and answers the driver's calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weightsync.channel.wire import SentError
from weightsync.errors import StateError, TransportError, WeightSyncError
from weightsync.node.calls import Method, known, methods_of
from weightsync.node.codec import encode
from weightsync.node.messages import (
    MAX_NBYTES,
    Answer,
    Ask,
    Bye,
    Drop,
    FromNode,
    Hello,
    NodeOffer,
    Notice,
    Raised,
    Refused,
    Tell,
    ToNode,
    Welcome,
    to_node,
)
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.stream import Splitter, framed, keep_alive

__all__ = ["InThreads", "Node", "serve"]

logger = logging.getLogger("weightsync.node")

_CHUNK_NBYTES = 1 << 20
_PAUSE_S = 0.2
"""Time between two attempts to dial."""
_AGAIN_S = 3600.0
"""How long a thread of `serve` looks for its driver: a link may be down for long."""


class Node:
    """Answers a driver's calls of one peer, many at a time, on one connection.

    If the connection is lost, the node dials again, and answers calls of the old connection on the new one.

    Attributes:
        welcomed: done once the driver has a place for this process. Has the error of `serve` instead, if the
            driver refuses the process or is not reached.
    """

    def __init__(self, offer: NodeOffer, peer: object, protocol: type) -> None:
        """
        Args:
            offer: how to reach the driver, see `Links.offer`.
            peer: has the methods of `protocol`, as coroutine functions.
            protocol: such as `weightsync.protocol.peers.HolderPeer`.
        """
        self._offer, self._peer, self._methods = offer, peer, methods_of(protocol)
        self._process = secrets.token_hex(8)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: dict[int, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ahead_s = 0.0  # of this process's clock, by which it is ahead of the driver's
        self.welcomed: Future[None] = Future()

    async def serve(self, dial_s: float = 10.0, again_s: float = 10.0) -> None:
        """Answer calls until the driver ends the link.

        Raises StateError if the driver refuses this process, and TransportError if the driver cannot be
        reached in `dial_s` seconds at first, or later in `again_s` seconds.
        """
        self._loop = asyncio.get_running_loop()
        try:
            while not await self._answer(*await self._dial_within(dial_s)):
                dial_s = again_s
        except WeightSyncError as error:
            if not self.welcomed.done():
                self.welcomed.set_exception(error)
            raise
        finally:
            self._loop = None
            for task in self._tasks.values():
                task.cancel()
            self._hang_up()

    def notify(self, notice: Notice) -> None:
        """Send news to the driver, from any thread. Without a connection they are lost."""
        if loop := self._loop:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._send, notice)

    async def _dial_within(self, timeout_s: float) -> tuple[asyncio.StreamReader, bytes]:
        try:
            return await asyncio.wait_for(self._dial(), timeout_s)
        except asyncio.TimeoutError as error:
            raise TransportError(
                f"the driver does not answer at {self._offer.endpoint}: open that port, or set sync.ports"
            ) from error

    async def _dial(self) -> tuple[asyncio.StreamReader, bytes]:
        """Return a connection and the driver's first bytes."""
        while True:
            try:
                reader, first = await self._greeted()
            except OSError as error:
                logger.debug("the driver is not reached: %s", error)
            else:
                if first:
                    return reader, first
                logger.debug("the driver hangs up, as one that does not know this node")
            await asyncio.sleep(_PAUSE_S)

    async def _greeted(self) -> tuple[asyncio.StreamReader, bytes]:
        """Dial, and say hello. Returns no bytes if the driver hangs up."""
        where = urlsplit(self._offer.endpoint)
        reader, self._writer = await asyncio.open_connection(where.hostname, where.port)
        keep_alive(self._writer.get_extra_info("socket"))
        self._writer.write(framed(self._offer.secret.encode()))
        self._send(Hello(self._process, frozenset(self._tasks.keys() | self._unsent.keys())))
        first = b""
        try:
            first = await reader.read(_CHUNK_NBYTES)
        finally:
            if not first:
                self._hang_up()
        return reader, first

    async def _answer(self, reader: asyncio.StreamReader, first: bytes) -> bool:
        """Answer calls until the connection is lost. Returns True if the driver has ended the link."""
        try:
            async for messages in _chunks(reader, first):
                dropped = {each.ticket for each in messages if isinstance(each, Drop)}
                for each in messages:
                    if isinstance(each, Refused):
                        raise StateError(f"the driver refuses this process: {each.why}")
                    if isinstance(each, Bye):
                        return True
                    if isinstance(each, Welcome):
                        self._welcome(each)
                    if isinstance(each, Ask) and each.ticket not in dropped:
                        self._begin(each)
                for ticket in dropped & self._tasks.keys():
                    self._tasks[ticket].cancel()
                self._send_unsent()
        except OSError as error:
            logger.debug("the connection to the driver is lost: %s", error)
        finally:
            self._hang_up()
        return False

    def _welcome(self, welcome: Welcome) -> None:
        self._ahead_s = time.monotonic() - welcome.now
        if not self.welcomed.done():
            self.welcomed.set_result(None)

    def _begin(self, ask: Ask) -> None:
        if time.monotonic() - self._ahead_s > ask.deadline:
            logger.warning("%s() came after its deadline, and is not carried out", ask.method)
            return
        task = asyncio.get_running_loop().create_task(self._run(ask))
        self._tasks[ask.ticket] = task
        task.add_done_callback(lambda _: self._tasks.pop(ask.ticket, None))

    async def _run(self, ask: Ask) -> None:
        reply: Answer | Raised
        try:
            method = known(self._methods, ask.method)
            value = await self._called(ask, method)
            reply = Answer(ask.ticket, encode(value, method.answer))
        except WeightSyncError as error:
            reply = Raised(ask.ticket, SentError.of(error))
        except Exception as error:  # the driver waits for an answer, and calls it a PeerError
            logger.exception("%s() failed", ask.method)
            reply = Raised(ask.ticket, None, f"{type(error).__name__}: {error}")
        self._unsent[ask.ticket] = msgspec.msgpack.encode(reply)
        self._send_unsent()

    async def _called(self, ask: Ask, method: Method) -> Any:  # noqa: ANN401 - the method's answer
        args = method.decoded(ask.args)
        function = getattr(self._peer, ask.method)
        if not method.tells:
            return await function(*args)
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told.add_done_callback(lambda _: self._send(Tell(ask.ticket)))
        return await function(*args, told)

    def _send_unsent(self) -> None:
        while self._writer and self._unsent:
            ticket = next(iter(self._unsent))
            self._writer.write(framed(self._unsent.pop(ticket)))

    def _send(self, message: FromNode) -> None:
        if self._writer:
            self._writer.write(framed(msgspec.msgpack.encode(message)))

    def _hang_up(self) -> None:
        if self._writer:
            self._writer.close()
        self._writer = None


async def _chunks(reader: asyncio.StreamReader, data: bytes) -> AsyncIterator[list[ToNode]]:
    """Yield the messages that came together, first in `data`. Raises WireError for what is no message."""
    splitter = Splitter(MAX_NBYTES)
    while data:
        yield [to_node(each) for each in splitter.feed(data)]
        data = await reader.read(_CHUNK_NBYTES)


class InThreads:
    """Makes an object a peer: each call of a method runs on a thread of its own, and may hang."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, method: str) -> Callable[..., Coroutine[object, object, Any]]:
        function = getattr(self._target, method)

        async def call(*args: object) -> Any:  # noqa: ANN401 - the method's answer
            return await asyncio.wrap_future(on_daemon(partial(function, *args), f"weightsync-{method}"))

        return call


def serve(offer: NodeOffer, peer: object, protocol: type) -> Node:
    """Have a thread answer the driver's calls. Returns the thread's node, before the node has dialled.

    The thread dials again for `_AGAIN_S` seconds after a lost connection.
    """
    node = Node(offer, peer, protocol)
    on_daemon(lambda: asyncio.run(node.serve(again_s=_AGAIN_S)), "weightsync-node")
    return node
