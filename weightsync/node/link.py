"""The driver's end of nodes: one socket, which nodes dial."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Protocol

import msgspec

from weightsync.config import Ports, TlsFiles
from weightsync.errors import DeadlineError, PeerError, PeerLostError, WeightSyncError, WireError
from weightsync.node.calls import Method, methods_of
from weightsync.node.codec import decode
from weightsync.node.messages import (
    MAX_NBYTES,
    Answer,
    Ask,
    Bye,
    Drop,
    Hello,
    Join,
    JoinRank,
    Late,
    NodeOffer,
    Notice,
    Place,
    Raised,
    Refused,
    Tell,
    Welcome,
    from_node,
    joining,
)
from weightsync.protocol.listener import AcceptedConnection, Listener, Receive
from weightsync.protocol.log_level import log_level
from weightsync.protocol.ports import listen
from weightsync.protocol.timing import left_s
from weightsync.protocol.tls import accepting

logger = logging.getLogger("weightsync.node")


class Door(Protocol):
    """Lets processes join that show `token`."""

    token: str

    def link(self, join: Join | JoinRank) -> Link | str:
        """Return the link of a process, or why it has none now."""


class _Call:
    """A call that waits for its answer."""

    def __init__(self, name: str, method: Method, told: asyncio.Future[None] | None) -> None:
        self.name, self.method, self.told, self.timeout_s = name, method, told, left_s()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Link:
    """Calls to one node, many at a time. A peer of the driver: each method of the protocol can be awaited.

    A call raises the method's WeightSyncError, PeerError for another error of the method and for a call that
    was lost with its connection, and the error of `end`. It waits until the node has dialled, and is not
    carried out after the deadline of the task that waits for it, see `weightsync.protocol.timing`.

    Attributes:
        methods: the names of the methods.
        process: the process that has, or had, this place, as its hello names it; "" before the first.
        when_noticed: is called with the node's notices.
    """

    def __init__(self, name: str, protocol: type, again_s: float = math.inf) -> None:
        """
        Args:
            name: the peer's name in errors, such as ``holder 0``.
            protocol: the peer's methods, such as `HolderPeer`.
            again_s: how long a node that has hung up may take to dial again. After that the process counts as
                ended, and calls raise PeerLostError. By default only `end` says so.
        """
        self.name, self.again_s = name, again_s
        self._methods = methods_of(protocol)
        self.methods: Collection[str] = self._methods.keys()
        self.when_noticed: Callable[[Notice], None] = _nothing
        self._calls: dict[int, _Call] = {}
        self._ticket, self.process = 0, ""
        self._connection: AcceptedConnection | None = None
        self._dialled = asyncio.Event()
        self._lost_later: asyncio.TimerHandle | None = None
        self._error: WeightSyncError | None = None

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_") or method not in self._methods:
            raise AttributeError(method)
        return partial(self.call, method)

    def ask_readable(self, readable: asyncio.Future[None]) -> asyncio.Future[bool] | None:
        """See `TrainerPeer.ask_readable`: `publish` tells it."""
        return None

    @property
    def is_dialled(self) -> bool:
        """Return True if the node has dialled, and the connection lasts."""
        return self._connection is not None

    @property
    def has_ended(self) -> bool:
        """Return True after `end`, or if the node has hung up for too long."""
        return self._error is not None

    async def dialled(self) -> None:
        """Wait until the node has dialled. Raises PeerLostError if it has ended."""
        await self._dialled.wait()
        if self._error:
            raise self._error

    async def call(self, name: str, *args: object, part: str = "") -> Any:  # noqa: ANN401 - the method's answer
        """Call a method of the protocol by name, of a `part` of the process if one is named."""
        method = self._methods[name]
        told = args[-1] if method.tells else None
        assert told is None or isinstance(told, asyncio.Future)
        data = method.encoded(args[:-1] if method.tells else args)
        await self.dialled()
        self._ticket += 1
        ticket, call = self._ticket, _Call(name, method, told)
        self._calls[ticket] = call
        self._send(Ask(ticket, name, data, time.monotonic() + call.timeout_s, part))
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._send(Drop(ticket))
            raise
        finally:
            self._calls.pop(ticket, None)

    def _send(self, message: Ask | Bye | Drop | Welcome) -> None:
        if self._connection:
            self._connection.send(msgspec.msgpack.encode(message))

    def admit(self, connection: AcceptedConnection) -> Receive:
        """Take a connection of the node. The node has its place once it has said which process it is."""
        return partial(self._receive, connection)

    def _receive(self, connection: AcceptedConnection, data: bytes) -> None:
        message = from_node(data)
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif connection is not self._connection:
            raise WireError(f"{self.name} sent an answer before its hello")
        elif isinstance(message, Notice):
            self.when_noticed(message)
        else:
            self._came(message)

    def _greet(self, connection: AcceptedConnection, hello: Hello) -> None:
        if why := self._refusal(hello.process):
            logger.warning("[%s] a process that dials in its place is refused: %s", self.name, why)
            connection.send(msgspec.msgpack.encode(Refused(why)))
            return
        if self._connection:  # its end is not known here yet
            self._connection.when_lost = _nothing
            self._connection.abort()
        if self._lost_later:
            self._lost_later.cancel()
        self.process, self._connection, connection.when_lost = hello.process, connection, self._hung_up
        self._send(Welcome(time.monotonic()))
        self._dialled.set()
        for ticket in self._calls.keys() - hello.open:
            self._end(
                ticket, PeerError(self.name, "the connection was lost, and the call or its answer with it")
            )
        for ticket in hello.open - self._calls.keys():  # it was given up while the connection was lost
            self._send(Drop(ticket))

    def _refusal(self, process: str) -> str:
        if self._error:
            return f"it is taken for dead: {self._error}"
        return "another process has this place" if self.process not in ("", process) else ""

    def _came(self, message: Answer | Raised | Late | Tell) -> None:
        call = self._calls.get(message.ticket)
        if call is None or call.answer.done():
            return  # it was given up
        if isinstance(message, Tell):
            if call.told and not call.told.done():
                call.told.set_result(None)
            return
        try:
            call.answer.set_result(self._value(call, message))
        except WireError as error:
            call.answer.set_exception(PeerError(self.name, str(error)))
        except WeightSyncError as error:
            call.answer.set_exception(error)

    def _value(self, call: _Call, message: Answer | Raised | Late) -> object:
        if isinstance(message, Late):
            raise DeadlineError(call.name, (self.name,), round(call.timeout_s, 3))
        if isinstance(message, Answer):
            return decode(message.value, call.method.answer)
        raise message.error.rebuild() if message.error else PeerError(self.name, message.text)

    def _hung_up(self) -> None:
        self._connection = None
        if self._error:
            return
        self._dialled.clear()
        if math.isfinite(self.again_s):
            error = PeerLostError(self.name, "it has hung up, and does not dial again")
            self._lost_later = asyncio.get_running_loop().call_later(self.again_s, self.end, error)

    def end(self, error: WeightSyncError) -> None:
        """End the link: calls raise `error`, and the node is refused."""
        if self._error:
            return
        self._error = error
        if self._lost_later:
            self._lost_later.cancel()
        self._send(Bye())
        if self._connection:
            self._connection.hang_up()
        self._dialled.set()
        for ticket in [*self._calls]:
            self._end(ticket, error)

    def _end(self, ticket: int, error: WeightSyncError) -> None:
        if not (answer := self._calls[ticket].answer).done():
            answer.set_exception(error)


class Links:
    """The links of a driver. Used on one event loop."""

    def __init__(
        self, host: str, ports: Ports | None = None, tls: TlsFiles | None = None, door: Door | None = None
    ) -> None:
        """Listen at `host`, on a port of the range `ports`, by default on any free port.

        Nodes dial with TLS if there are `tls`. Processes that know the token of `door`, if there is one, join
        if it has a link for them. Raises ConfigError or TransportError as `accepting` and
        `weightsync.protocol.ports.listen`.
        """
        accepts = accepting(tls) if tls else None
        listening = listen(host, ports, "the driver cannot listen for nodes")
        self._listener, self._tls = Listener(listening, self._admit, MAX_NBYTES, accepts), tls
        self._by_secret: dict[str, Link] = {}
        self._door = door
        if door:
            self._listener.secrets.add(door.token)

    def offer(self, link: Link) -> NodeOffer:
        """Return how the node of `link` dials."""
        secret = secrets.token_hex(32)
        self._by_secret[secret] = link
        self._listener.secrets.add(secret)
        return NodeOffer(self._listener.endpoint, secret, log_level(), self._tls)

    async def close(self) -> None:
        """Hang up. Nodes end."""
        for link in self._by_secret.values():
            link.end(PeerError(link.name, "the driver has closed"))
        await self._listener.close()

    def _admit(self, connection: AcceptedConnection, secret: str) -> Receive:
        if self._door and secret == self._door.token:
            return partial(self._join, connection)
        return self._by_secret[secret].admit(connection)

    def _join(self, connection: AcceptedConnection, data: bytes) -> None:
        assert self._door
        found = self._door.link(joining(data))
        if isinstance(found, Link):
            connection.send(msgspec.msgpack.encode(Place(self.offer(found))))
            connection.hang_up()
        else:  # it asks again, maybe for weeks: another connection would cost a handshake, and a used proof
            connection.send(msgspec.msgpack.encode(Refused(found)))


def _nothing(*_: object) -> None:
    """Do nothing: nobody waits for it."""
