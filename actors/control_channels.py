"""The driver's end of control channels, and of trainers' notices: one socket, which processes dial.

See `weightsync.channel.control` for what travels on it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Hashable
from typing import Any, Protocol, cast

import msgspec
import ray

from weightsync.channel.control import (
    CALLS,
    MAX_FRAME_NBYTES,
    Answer,
    Ask,
    ControlOffer,
    Hello,
    Published,
    Raised,
    Readable,
    decode_reply,
    pack,
    unpack,
)
from weightsync.config import Ports
from weightsync.errors import PeerError, PeerLostError, WeightSyncError, WireError
from weightsync.protocol.messages import PublishReport
from weightsync.protocol.ports import BACKLOG, listen
from weightsync.protocol.stream import Splitter, endpoint_of, framed, keep_alive

logger = logging.getLogger("weightsync.control")

_HANDSHAKE_S = 5.0
"""A process that has not shown the secret after this time is disconnected, which frees its descriptor."""


class _Dials(Protocol):
    """An actor that may be able to dial."""

    name: str

    @property
    def key(self) -> Hashable: ...

    def answers(self, method: str) -> bool: ...


class Callee(_Dials, Protocol):
    """An actor that may have a control channel."""

    channel: ControlChannel | None

    async def answer_calls(self, offer: ControlOffer) -> None: ...


class Notifier(_Dials, Protocol):
    """A trainer's actor, which may say when its weights can be read, and be asked on a control channel."""

    notices: PublishNotices | None
    channel: ControlChannel | None

    async def dial(self, offer: ControlOffer, asks: ControlOffer | None) -> None: ...


class PublishNotices:
    """What one trainer rank says while it publishes, and what it has published."""

    def __init__(self) -> None:
        self._ticket = 0
        self._readable: asyncio.Future[None] | None = None
        self._report: asyncio.Future[PublishReport] | None = None

    def expect(
        self, readable: asyncio.Future[None], report: asyncio.Future[PublishReport] | None = None
    ) -> int:
        """Resolve these with the next notices. Returns the ticket that the notices have to carry."""
        self._ticket, self._readable, self._report = self._ticket + 1, readable, report
        return self._ticket

    def came(self, notice: Readable | Published) -> None:
        """Take a notice. One of an earlier ticket is of a `publish` that the driver gave up.

        Raises WireError if its report is none.
        """
        if notice.ticket != self._ticket:
            return
        if isinstance(notice, Published):
            if self._report and not self._report.done():
                self._report.set_result(unpack(notice.report, PublishReport))
        elif self._readable and not self._readable.done():
            self._readable.set_result(None)


class ControlChannel:
    """Calls to one process, one at a time.

    A call that was given up may still arrive, as after a link was down. Until it is answered, the channel is
    `stuck`; `ControlChannels.replace` keeps the process from carrying it out.
    """

    def __init__(self, name: str, channels: ControlChannels) -> None:
        self.name, self.channels = name, channels
        self._connection: _Connection | None = None
        self._ticket = 0
        self._method = ""
        self._waiting: asyncio.Future[Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the process has dialled, and the connection lasts."""
        return self._connection is not None

    @property
    def stuck(self) -> bool:
        """Whether a call was given up and is not answered yet."""
        return self._waiting is not None and self._waiting.cancelled()

    def call(self, method: str, args: tuple[object, ...]) -> asyncio.Future[Any] | None:
        """Call `method`. Returns None if the call has to go through Ray.

        That is so for methods that `CALLS` lacks, until the process has dialled, while it has not answered an
        earlier call, and for arguments that a frame does not hold, such as the places of thousands of parts.
        The awaited answer raises the method's WeightSyncError, PeerLostError if the process has ended, or
        PeerError for any other error.
        """
        if method not in CALLS or self._connection is None or self._waiting is not None:
            return None
        ask = msgspec.msgpack.encode(Ask(self._ticket + 1, method, pack(args)))
        if len(ask) > MAX_FRAME_NBYTES:
            return None
        self._ticket += 1
        if not self._connection.send(ask):
            return None  # the connection is lost, as `end` will say
        self._method, self._waiting = method, asyncio.get_running_loop().create_future()
        return self._waiting

    def dialled(self, connection: _Connection) -> None:
        """Use the `connection` that the process has opened."""
        self._connection = connection

    def answered(self, reply: Answer | Raised) -> None:
        """Give a reply to the call that waits for it."""
        waiting = self._waiting
        if waiting is None or reply.ticket != self._ticket:
            raise WireError(f"{self.name} answered what it was not asked")
        self._waiting = None
        if waiting.done():
            return  # the caller has given it up
        try:
            waiting.set_result(self._value(reply))
        except WireError as error:
            waiting.set_exception(PeerError(self.name, str(error)))
        except WeightSyncError as error:
            waiting.set_exception(error)

    def hang_up(self) -> None:
        """Have the process end its part, once it has done what it was asked."""
        if self._connection:
            self._connection.send(msgspec.msgpack.encode(Ask(0, "", pack(()))))

    def end(self, error: WeightSyncError) -> None:
        """Have the unanswered call raise `error`. Later calls go through Ray."""
        self._connection = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    def _value(self, reply: Answer | Raised) -> object:
        if isinstance(reply, Answer):
            return unpack(reply.value, CALLS[self._method].answer)
        raise reply.error.rebuild() if reply.error else PeerError(self.name, reply.text)


class ControlChannels:
    """The control channels of all processes that a driver calls. Used on one event loop."""

    def __init__(self, ports: Ports | None, host: str = "") -> None:
        """
        Args:
            ports: the range of the port on which it listens; any free one without it.
            host: the address on which it listens; that of this host without it.
        """
        self._ports, self._host = ports, host
        self._listener: _Listener | None = None
        self._channels: dict[Hashable, ControlChannel] = {}
        self._notices: dict[Hashable, PublishNotices] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, callee: Callee) -> None:
        """Give `callee` its actor's channel, which works once the actor has dialled.

        Raises ConfigError or TransportError as `weightsync.protocol.ports.listen`.
        """
        if callee.key not in self._channels and callee.answers("answer_calls"):
            channel, offer = self._listening().add(callee.name, self)
            self._channels[callee.key] = channel
            self._run(self._keep(callee, channel, offer))
        callee.channel = self._channels.get(callee.key)

    def open_notices(self, trainer: Notifier, *, asks: bool = False) -> None:
        """Have a trainer's actor dial, to say in each update when its weights may be read.

        If the driver `asks` it itself, it also gets a control channel for that. Raises as `open`.
        """
        if trainer.key not in self._notices and trainer.answers("dial"):
            notices, offer = self._listening().add_notices()
            self._notices[trainer.key] = notices
            channel_offer = None
            if asks:
                self._channels[trainer.key], channel_offer = self._listening().add(trainer.name, self)
            self._run(self._have_dialled(trainer, offer, channel_offer))
        trainer.notices = self._notices.get(trainer.key)
        trainer.channel = self._channels.get(trainer.key)

    async def replace(self, callee: Callee) -> None:
        """Give `callee` a new channel. Calls that come later by the earlier one are not carried out.

        What is called through Ray after this has returned comes after that.
        """
        self.forget(callee.key)
        self.open(callee)
        await asyncio.sleep(0)  # `_keep` has begun, so Ray has been asked for `answer_calls` first

    def forget(self, key: Hashable) -> None:
        """Hang up on the callee with this `key`. `open` gives it a new channel."""
        if channel := self._channels.pop(key, None):
            channel.hang_up()
            channel.end(PeerError(channel.name, "its control channel was replaced"))

    async def close(self) -> None:
        """Hang up. Each process ends its part when it notices."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channels.clear()
        self._notices.clear()
        if self._listener:
            await self._listener.close()
            self._listener = None

    def _listening(self) -> _Listener:
        if self._listener is None:
            self._listener = _Listener(self._ports, self._host or ray.util.get_node_ip_address())
        return self._listener

    async def _have_dialled(self, trainer: Notifier, offer: ControlOffer, asks: ControlOffer | None) -> None:
        try:
            await trainer.dial(offer, asks)
        except WeightSyncError as error:
            logger.warning("[%s] its weights are read after its digests are taken: %s", trainer.name, error)
            self._notices.pop(trainer.key, None)

    def _run(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, callee: Callee, channel: ControlChannel, offer: ControlOffer) -> None:
        """Have the process answer calls for as long as the channel lasts."""
        error: WeightSyncError = PeerError(callee.name, "its control channel broke")
        try:
            await callee.answer_calls(offer)
        except WeightSyncError as raised:
            error = raised
        replaced = self._channels.get(callee.key) is not channel
        if not isinstance(error, PeerLostError) and ray.is_initialized() and not replaced:
            logger.warning("[%s] is called through Ray from now on: %s", callee.name, error)
        channel.end(error)
        if not replaced:
            del self._channels[callee.key]


class _Listener:
    """The listening socket, and the channels by number."""

    def __init__(self, ports: Ports | None, host: str) -> None:
        listening = listen(host, ports, "the driver cannot listen for control channels")
        self.secret, self._endpoint = secrets.token_hex(32), endpoint_of(listening)
        self._channels: list[ControlChannel] = []
        self._notices: list[PublishNotices] = []
        self.connections: set[_Connection] = set()
        serving = asyncio.get_running_loop().create_server(
            lambda: _Connection(self), sock=listening, backlog=BACKLOG
        )
        self._serving = asyncio.ensure_future(serving)

    def add_notices(self) -> tuple[PublishNotices, ControlOffer]:
        """Return the notices of one more trainer, and what it needs to dial."""
        self._notices.append(PublishNotices())
        return self._notices[-1], ControlOffer(self._endpoint, self.secret, len(self._notices) - 1)

    def add(self, name: str, channels: ControlChannels) -> tuple[ControlChannel, ControlOffer]:
        """Return a new channel, and what the process needs to dial."""
        channel = ControlChannel(name, channels)
        self._channels.append(channel)
        return channel, ControlOffer(self._endpoint, self.secret, len(self._channels) - 1)

    def received(self, connection: _Connection, data: bytes) -> None:
        """Hand a reply to whom it is for. Raises WireError or LookupError for a strange one."""
        reply = decode_reply(data)
        if isinstance(reply, Hello):
            connection.channel = self._channels[reply.number]
            connection.channel.dialled(connection)
        elif isinstance(reply, Readable | Published):
            self._notices[reply.number].came(reply)
        elif connection.channel is None:
            raise WireError("an answer without a hello")
        else:
            connection.channel.answered(reply)

    async def close(self) -> None:
        (await self._serving).close()
        for connection in self.connections:
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn


class _Connection(asyncio.Protocol):
    """The driver's end of one connection. A process that does not show the secret first is disconnected."""

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self._secret = listener.secret.encode()
        self._messages = Splitter(len(self._secret))
        self._admitted = False
        self.channel: ControlChannel | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(self._transport.get_extra_info("socket"))
        self._listener.connections.add(self)
        self._limit = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._messages.feed(data):
                if self._admitted:
                    self._received(message)
                elif not self._admits(message):
                    return
        except WireError as error:
            if self._admitted:
                logger.warning("a process is disconnected: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        self._listener.connections.discard(self)

    def send(self, data: bytes) -> bool:
        """Send one message. Returns False if the process has hung up."""
        if self._transport.is_closing():
            return False
        self._transport.write(framed(data))
        return True

    def abort(self) -> None:
        """Hang up, without what was not sent yet."""
        self._transport.abort()

    def _admits(self, message: bytes) -> bool:
        self._admitted = hmac.compare_digest(message, self._secret)
        if self._admitted:
            self._limit.cancel()
            self._messages.max_nbytes = MAX_FRAME_NBYTES
        else:
            self._transport.abort()
        return self._admitted

    def _received(self, message: bytes) -> None:
        try:
            self._listener.received(self, message)
        except (WireError, LookupError) as error:
            logger.warning("a process sent to the driver what it should not: %s", error)
