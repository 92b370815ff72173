"""The driver's end of control channels, and of trainers' notices: one socket, which processes dial.

`weightsync.channel.control` describes the messages.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Hashable
from functools import partial
from typing import Any, Protocol

import msgspec
import ray

from weightsync.channel.control import (
    CALLS,
    MAX_FRAME_NBYTES,
    Answer,
    Ask,
    ControlOffer,
    Published,
    Raised,
    Readable,
    Reply,
    decode_reply,
    pack,
    unpack,
)
from weightsync.config import Ports
from weightsync.errors import PeerError, PeerLostError, WeightSyncError, WireError
from weightsync.protocol.listener import SECRET_NBYTES, Connection, Listener, Receive
from weightsync.protocol.messages import PublishReport
from weightsync.protocol.ports import listen

logger = logging.getLogger("weightsync.control")


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
    """A trainer's actor, which may say when weights can be read, and be asked on a control channel."""

    notices: PublishNotices | None
    channel: ControlChannel | None

    async def dial(self, offer: ControlOffer, asks: ControlOffer | None) -> None: ...


class PublishNotices:
    """The notices of one trainer rank while it publishes, and the report."""

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

    def dialled(self, connection: Connection) -> bool:
        """Return True: a trainer whose connection was lost dials again, and has one for some time."""
        return True

    def came(self, notice: Reply) -> None:
        """Handle a notice. Ignores tickets of abandoned `publish` calls.

        Raises WireError if it is no notice, or if the report cannot be decoded.
        """
        if not isinstance(notice, Readable | Published):
            raise WireError("an answer where nothing was asked")
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
        self._connection: Connection | None = None
        self._ticket = 0
        self._method = ""
        self._waiting: asyncio.Future[Any] | None = None
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Return True if the process has dialled, and the connection lasts."""
        return self._connection is not None

    @property
    def stuck(self) -> bool:
        """Return True if a call was given up and is not answered yet."""
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

    def dialled(self, connection: Connection) -> bool:
        """Use the `connection` that the process has opened. Return False if it has another one, or ended."""
        if self._connection:
            logger.warning("[%s] a second process dials in its place, and is refused", self.name)
        if self._connection or self._is_over:
            return False
        self._connection, connection.when_lost = connection, self._lost
        return True

    def came(self, reply: Reply) -> None:
        """Give a reply to the call that waits for it."""
        waiting = self._waiting
        if not isinstance(reply, Answer | Raised) or waiting is None or reply.ticket != self._ticket:
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
        """Have the process close its end after running calls."""
        if self._connection:
            self._connection.send(msgspec.msgpack.encode(Ask(0, "", pack(()))))

    def end(self, error: WeightSyncError) -> None:
        """Have the unanswered call raise `error`. Later calls go through Ray."""
        self._connection, self._is_over = None, True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    def _lost(self) -> None:
        self._connection = None  # the process may dial again

    def _value(self, reply: Answer | Raised) -> object:
        if isinstance(reply, Answer):
            return unpack(reply.value, CALLS[self._method].answer)
        raise reply.error.rebuild() if reply.error else PeerError(self.name, reply.text)


class ControlChannels:
    """The control channels of all processes that a driver calls. Used on one event loop."""

    def __init__(self, ports: Ports | None, host: str = "") -> None:
        """
        Args:
            ports: the range of the port to listen on; by default any free port.
            host: the address to listen on; by default this host's address.
        """
        self._ports, self._host = ports, host
        self._listener: Listener | None = None
        self._by_secret: dict[bytes, ControlChannel | PublishNotices] = {}
        self._channels: dict[Hashable, ControlChannel] = {}
        self._notices: dict[Hashable, PublishNotices] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, callee: Callee) -> None:
        """Give `callee` a channel to the actor, which works once the actor has dialled.

        Raises ConfigError or TransportError as `weightsync.protocol.ports.listen`.
        """
        if callee.key not in self._channels and callee.answers("answer_calls"):
            channel = ControlChannel(callee.name, self)
            offer = self._offer(channel)
            self._channels[callee.key] = channel
            self._run(self._keep(callee, channel, offer))
        callee.channel = self._channels.get(callee.key)

    def open_notices(self, trainer: Notifier, *, asks: bool = False) -> None:
        """Have a trainer's actor dial, to say in each update when weights may be read.

        If the driver `asks` the trainer itself, the trainer also gets a control channel for calls. Raises as
        `open`.
        """
        if trainer.key not in self._notices and trainer.answers("dial"):
            notices, channel_offer = PublishNotices(), None
            offer = self._offer(notices)
            self._notices[trainer.key] = notices
            if asks:
                channel = self._channels[trainer.key] = ControlChannel(trainer.name, self)
                channel_offer = self._offer(channel)
            self._run(self._have_dialled(trainer, offer, channel_offer))
        trainer.notices = self._notices.get(trainer.key)
        trainer.channel = self._channels.get(trainer.key)

    async def replace(self, callee: Callee) -> None:
        """Give `callee` a new channel. Late calls by the earlier channel are not run.

        Ray calls after this method has returned come after calls by the earlier channel.
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
        """Hang up. Processes close their ends when they notice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channels.clear()
        self._notices.clear()
        self._by_secret.clear()
        if self._listener:
            await self._listener.close()
            self._listener = None

    def _offer(self, place: ControlChannel | PublishNotices) -> ControlOffer:
        """Return the offer with which a process dials for `place`."""
        if self._listener is None:
            host = self._host or ray.util.get_node_ip_address()
            listening = listen(host, self._ports, "the driver cannot listen for control channels")
            self._listener = Listener(listening, self._admit, MAX_FRAME_NBYTES)
        secret = secrets.token_hex(SECRET_NBYTES // 2)
        self._by_secret[secret.encode()] = place
        return ControlOffer(self._listener.endpoint, secret)

    def _admit(self, connection: Connection, secret: bytes) -> Receive | None:
        place = self._by_secret.get(secret)
        return partial(_receive, place) if place and place.dialled(connection) else None

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
        self._by_secret.pop(offer.secret.encode(), None)
        if not replaced:
            del self._channels[callee.key]


def _receive(place: ControlChannel | PublishNotices, data: bytes) -> None:
    try:
        place.came(decode_reply(data))
    except WireError as error:
        logger.warning("a process sent to the driver what it should not: %s", error)
