"""A process's end: it dials its driver, and answers the driver's calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import select
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import msgspec

from weightsync.channel.wire import SentError
from weightsync.errors import StateError, TransportError, WeightSyncError, WireError
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
    Late,
    NodeOffer,
    Notice,
    Raised,
    Refused,
    Tell,
    Welcome,
    to_node,
)
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.log_level import use_log_level
from weightsync.protocol.stream import Stream

logger = logging.getLogger("weightsync.node")

_PAUSE_S = 0.2
"""Time between two attempts to dial."""
_LOOK_S = 5.0
"""How often threads that wait look whether the node is to end."""
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_SEND_S = 10.0
"""Time for the driver to make room for a message."""
_AGAIN_S = 3600.0
"""How long `serve` looks for its driver after a lost connection: a link may be down for long."""


class Node:
    """Answers a driver's calls of one peer, many at a time, on one connection.

    Some threads wait for messages, of which the kernel wakes one. It answers the call that it has read, and
    the next call wakes another one. So no call waits for another, and none changes threads. If the connection
    is lost, the node dials again, and answers calls of the old connection on the new one.

    Attributes:
        welcomed: done once the driver has a place for this process. Has the error of `run` instead, if the
            driver refuses the process or is not reached.
    """

    def __init__(
        self,
        offer: NodeOffer,
        peer: Any,  # noqa: ANN401 - it has the methods of `protocol`
        protocol: type,
        loop: asyncio.AbstractEventLoop | None = None,
        process: str = "",
    ) -> None:
        """
        Args:
            offer: how to reach the driver, see `Links.offer`.
            peer: has the methods of `protocol`, as functions or coroutine functions. If it has parts,
                ``part(name)`` returns one, with the same methods.
            protocol: such as `weightsync.protocol.peers.HolderPeer`.
            loop: where coroutines run, by default on a thread of the node.
            process: the process's name in its hello. By default names differ by node.
        """
        use_log_level(offer.log_level)
        self._offer, self._peer, self._methods, self._loop = offer, peer, methods_of(protocol), loop
        self._process = process or secrets.token_hex(8)
        self._counting, self._sending, self._poll = threading.Lock(), threading.Lock(), select.epoll()
        self._num_idle = 0
        self._running: dict[int, Future[Any] | None] = {}
        self._unsent: dict[int, bytes] = {}
        self._stream: Stream | None = None
        self._ahead_s = 0.0  # of this process's clock, by which it is ahead of the driver's
        self._over, self._error, self._again_s = threading.Event(), None, 0.0
        self.welcomed: Future[None] = Future()

    _error: WeightSyncError | None

    async def serve(self, dial_s: float = 10.0, again_s: float = 10.0) -> None:
        """Answer calls as `run`, on other threads. Coroutines run on this loop."""
        self._loop = self._loop or asyncio.get_running_loop()
        try:
            await asyncio.wrap_future(on_daemon(partial(self.run, dial_s, again_s), "weightsync-node"))
        finally:
            self.stop()

    def run(self, dial_s: float = 10.0, again_s: float = 10.0) -> None:
        """Answer calls until the driver ends the link, or until `stop`.

        Raises StateError if the driver refuses this process, TransportError if it cannot be reached in
        `dial_s` seconds at first or later in `again_s` seconds, and WireError if it sends no message of ours.
        """
        self._again_s = again_s
        self._begin(self._dial(dial_s))
        on_daemon(self._work, "weightsync-node")
        self._over.wait()
        if self._error:
            raise self._error

    def stop(self) -> None:
        """End the node. Calls that run finish, and nobody gets their answers."""
        self._end(None)

    def notify(self, notice: Notice) -> None:
        """Send news to the driver, from any thread. Without a connection they are lost."""
        self._send(notice)

    def _work(self) -> None:
        """Wait for messages and answer calls, beside other threads."""
        while not self._over.is_set():
            with self._counting:
                self._num_idle += 1
            try:
                is_woken = bool(self._poll.poll(_LOOK_S))
            except ValueError:  # the node has ended
                is_woken = False
            with self._counting:
                self._num_idle -= 1
                is_last = self._num_idle == 0
            if not (is_woken or is_last):
                return  # others are enough
            if is_woken and (asked := self._read()):
                if is_last:
                    on_daemon(self._work, "weightsync-node")
                self._begin(asked[1:])
                self._answer(asked[0])

    def _begin(self, asked: Sequence[Ask]) -> None:
        for ask in asked:
            on_daemon(partial(self._answer, ask), "weightsync-node")

    def _read(self) -> list[Ask]:
        """Return the calls that have come together, for the one thread that was woken."""
        try:
            assert self._stream
            asked = self._take(self._stream.receive_many(0))
        except WireError as error:
            self._end(error)
            return []
        except OSError as error:
            logger.debug("the connection to the driver is lost: %s", error)
            return self._dial(self._again_s)
        with contextlib.suppress(ValueError):  # the node has ended
            self._poll.modify(self._stream, _ONCE)  # the next message wakes one thread
        return asked

    def _take(self, came: Sequence[bytes]) -> list[Ask]:
        """Handle messages that came together. Returns calls that were not dropped."""
        messages = [to_node(each) for each in came]
        dropped = {each.ticket for each in messages if isinstance(each, Drop)}
        for message in messages:
            if isinstance(message, Welcome):
                self._ahead_s = time.monotonic() - message.now
                if not self.welcomed.done():
                    self.welcomed.set_result(None)
            elif isinstance(message, Refused):
                self._end(StateError(f"the driver refuses this process: {message.why}"))
            elif isinstance(message, Bye):
                self._end(None)
        asked = [each for each in messages if isinstance(each, Ask) and each.ticket not in dropped]
        with self._sending:
            self._running |= {each.ticket: None for each in asked}
            for ticket in dropped:
                if coroutine := self._running.get(ticket):
                    coroutine.cancel()
        return [] if self._over.is_set() else asked

    def _end(self, error: WeightSyncError | None) -> None:
        if error and not self._over.is_set():
            logger.warning("this process is called no more by its driver: %s", error)
        self._error = self._error or error
        if not self.welcomed.done():
            self.welcomed.set_exception(error or StateError("the node has ended"))
        self._over.set()
        if self._stream:
            self._stream.close()
        self._poll.close()

    def _dial(self, timeout_s: float) -> list[Ask]:
        """Connect, until the driver answers. Returns the first calls. Ends the node if that takes longer."""
        deadline, cause = time.monotonic() + timeout_s, ""
        while not self._over.is_set():
            try:
                return self._greet(max(_PAUSE_S, deadline - time.monotonic()))
            except WeightSyncError as error:
                self._end(error)
            except OSError as error:
                logger.debug("the driver is not reached: %s", error)
                cause = f" ({error})"
            if self._stream:
                self._stream.close()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                where = self._offer.endpoint
                why = f"the driver does not answer at {where}: open that port, or set sync.ports{cause}"
                self._end(TransportError(why))
            self._over.wait(min(_PAUSE_S, max(0.0, left_s)))
        return []

    def _greet(self, timeout_s: float) -> list[Ask]:
        """Dial, and say hello. Returns the first calls. Raises OSError if the driver does not answer."""
        offer, send_s = self._offer, min(timeout_s, _SEND_S)
        stream = Stream(offer.endpoint, offer.secret, MAX_NBYTES, send_s, offer.tls)
        with self._sending:
            if self._stream:
                self._stream.close()
            self._stream = stream
            waiting = frozenset(self._running.keys() | self._unsent.keys())
            stream.send(msgspec.msgpack.encode(Hello(self._process, waiting)))
        deadline = time.monotonic() + timeout_s
        while not (first := stream.receive_many(max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise TimeoutError("the driver does not answer a hello")
        asked = self._take(first)
        with self._sending:
            self._send_answers()
        try:
            self._poll.register(stream, _ONCE)
        except ValueError:  # the node has ended
            stream.close()
        return asked

    def _answer(self, ask: Ask) -> None:
        if time.monotonic() - self._ahead_s > ask.deadline:
            logger.warning("%s() came after its deadline, and is not carried out", ask.method)
            self._reply(Late(ask.ticket))
            return
        reply: Answer | Raised
        try:
            method = known(self._methods, ask.method)
            reply = Answer(ask.ticket, encode(self._called(ask, method), method.answer))
        except WeightSyncError as error:
            reply = Raised(ask.ticket, SentError.of(error))
        except CancelledError:  # it was dropped
            reply = Raised(ask.ticket, None, "nobody waits for it")
        except Exception as error:  # the driver waits for an answer, and calls it a PeerError
            logger.exception("%s() failed", ask.method)
            reply = Raised(ask.ticket, None, f"{type(error).__name__}: {error}")
        self._reply(reply)

    def _reply(self, reply: Answer | Raised | Late) -> None:
        data = msgspec.msgpack.encode(reply)
        with self._sending:
            del self._running[reply.ticket]
            self._unsent[reply.ticket] = data
            self._send_answers()

    def _called(self, ask: Ask, method: Method) -> Any:  # noqa: ANN401 - the method's answer
        args = method.decoded(ask.args)
        if method.tells:
            args = *args, _Told(partial(self._send, Tell(ask.ticket)))
        peer = self._peer.part(ask.part) if ask.part else self._peer
        answer = getattr(peer, ask.method)(*args)
        if not inspect.iscoroutine(answer):
            return answer
        called: list[Future[Any]] = []

        async def unless_dropped() -> Any:  # noqa: ANN401
            if called and called[0].cancelled():
                answer.close()
                raise asyncio.CancelledError
            return await answer

        with self._sending:
            called.append(asyncio.run_coroutine_threadsafe(unless_dropped(), self._own_loop()))
            self._running[ask.ticket] = called[0]
        return called[0].result()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._counting:
            if self._loop is None:
                started: Future[asyncio.AbstractEventLoop] = Future()

                async def until_over() -> None:
                    started.set_result(asyncio.get_running_loop())
                    await asyncio.to_thread(self._over.wait)

                on_daemon(lambda: asyncio.run(until_over()), "weightsync-node")
                self._loop = started.result()
            return self._loop

    def _send_answers(self) -> None:
        """Send the answers that are ready. If the connection is lost, they stay. Needs `_sending`."""
        while self._unsent and self._stream:
            ticket, data = next(iter(self._unsent.items()))
            if not self._is_sent(data):
                return
            del self._unsent[ticket]

    def _send(self, message: FromNode) -> None:
        with self._sending:
            self._is_sent(msgspec.msgpack.encode(message))

    def _is_sent(self, data: bytes) -> bool:
        """Send a message. If it does not get through whole, the connection is of no more use."""
        if self._stream is None:
            return False
        try:
            self._stream.send(data)
        except OSError as error:
            logger.debug("the connection to the driver is lost: %s", error)
            self._stream.shut()
            return False
        return True


class _Told:
    """Stands for the future of a method that `Method.tells`: the driver has it."""

    def __init__(self, tell: Any) -> None:  # noqa: ANN401 - a function without arguments
        self._tell, self._is_done = tell, False

    def done(self) -> bool:
        return self._is_done

    def set_result(self, _: None) -> None:
        self._is_done = True
        self._tell()


def serve(
    offer: NodeOffer, peer: object, protocol: type, loop: asyncio.AbstractEventLoop | None = None
) -> Node:
    """Have threads answer the driver's calls. Returns their node, before the node has dialled.

    The node dials again for `_AGAIN_S` seconds after a lost connection.
    """
    node = Node(offer, peer, protocol, loop)
    on_daemon(partial(node.run, again_s=_AGAIN_S), "weightsync-node")
    return node
