"""The channel by which a holder asks a trainer rank to push weights from host memory.

No other process can map a trainer's heap. The rank makes a *ring* of buffers that the holder maps, and says
hello with the buffers' handles. Then the holder asks for one bucket after another. The rank copies a share of
the bucket into a buffer of the ring, and answers when the share is there.

Both ends are on one host. Messages travel on a Unix socket in a private directory, which is removed as soon
as the rank is connected. If a process ends, the other end notices at once.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from weightsync.channel.private_directory import PrivateDirectory
from weightsync.errors import DeadlineError, PeerLostError, TransportError, WireError
from weightsync.protocol.decoding import decoded
from weightsync.protocol.handles import Handle, PushTicket

logger = logging.getLogger("weightsync.channel")

_MAX_NBYTES = 64 << 10
_POLL_S = 0.05


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Trainer rank → holder, first: the rank's plan, and the buffers that the rank fills in turn."""

    secret: bytes
    plan_digest: str
    ring: tuple[Handle, ...]


class Push(msgspec.Struct, frozen=True, tag="push"):
    """Holder → trainer rank: copy your share of `bucket` into buffer number `buffer` of the ring."""

    ticket: int
    bucket: int
    buffer: int


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    """Trainer rank → holder: the push of `ticket` is done, or failed for a `cause`."""

    ticket: int
    cause: str = ""


_to_holder: msgspec.msgpack.Decoder[Hello | Pushed] = msgspec.msgpack.Decoder(Hello | Pushed)
_to_trainer = msgspec.msgpack.Decoder(Push)


class PushFeed:
    """The holder's end. Used by one thread at a time, except for `abort`, which any thread may call."""

    def __init__(self, trainer: str, device: str, num_buffers: int, nbytes: int) -> None:
        """
        Args:
            trainer: the rank's name in errors.
            device, num_buffers, nbytes: of the rank's ring, see `PushTicket`.
        """
        self._directory = PrivateDirectory()
        endpoint = str(self._directory.path / "push")
        self.ticket = PushTicket(endpoint, device, num_buffers, nbytes, secrets.token_bytes(32))
        self._trainer = trainer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(endpoint)
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._last = 0
        self._open: dict[int, str | None] = {}
        self._cause = ""
        self._aborted = threading.Event()

    def accept(self, plan_digest: str, timeout_s: float) -> tuple[Handle, ...]:
        """Wait for the rank's hello. Returns the handles of the ring.

        Raises DeadlineError if no hello comes, WireError if the rank has another plan.
        """
        deadline = time.monotonic() + timeout_s
        callers: list[socket.socket] = []
        try:
            while not (hello := self._hello(callers, deadline, timeout_s)):
                pass
        finally:
            for each in callers:
                each.close()
        self._listener.close()
        self._directory.remove()
        if hello.plan_digest != plan_digest:
            raise WireError(f"{self._trainer} does not hold plan {plan_digest}: it has {hello.plan_digest}")
        return hello.ring

    def ask(self, bucket: int, buffer: int) -> int:
        """Ask for a bucket. Returns the ticket for `wait`. Raises PeerLostError if the rank has ended."""
        assert self._connection
        self._last += 1
        try:
            self._connection.send(msgspec.msgpack.encode(Push(self._last, bucket, buffer)))
        except OSError as error:
            raise self._lost(error) from error
        self._open[self._last] = None
        return self._last

    def wait(self, ticket: int, bucket: int, timeout_s: float) -> None:
        """Wait until the push of `ticket` is done.

        Raises DeadlineError, PeerLostError if the rank has ended, TransportError if the push failed or
        `abort` was called.
        """
        deadline = time.monotonic() + timeout_s
        while (cause := self._open[ticket]) is None:
            self._take(deadline, f"push of bucket {bucket}", timeout_s)
        del self._open[ticket]
        if cause:
            raise TransportError(f"{self._trainer} cannot push bucket {bucket}: {cause}")

    def drain(self, timeout_s: float) -> None:
        """Wait until no push runs, so that the ring and the target memory are free for other uses.

        Raises the errors of `wait`, except for failed pushes.
        """
        deadline = time.monotonic() + timeout_s
        while any(cause is None for cause in self._open.values()):
            self._take(deadline, "the end of pushes that were given up", timeout_s)
        self._open.clear()

    def abort(self, cause: str) -> None:
        """End all current and later waits."""
        self._cause = cause
        self._aborted.set()

    def close(self) -> None:
        """Close the sockets. The rank then pushes no more. Safe to call twice."""
        self._listener.close()
        self._directory.remove()
        if self._connection:
            self._connection.close()

    def _take(self, deadline: float, phase: str, timeout_s: float) -> None:
        message = self._receive(deadline, phase, timeout_s)
        if not isinstance(message, Pushed) or message.ticket not in self._open:
            raise WireError(f"{self._trainer} says {message}, which nobody asked for")
        self._open[message.ticket] = message.cause

    def _receive(self, deadline: float, phase: str, timeout_s: float) -> Hello | Pushed:
        assert self._connection
        self._wait([self._connection], deadline, phase, timeout_s)
        try:
            data = self._connection.recv(_MAX_NBYTES)
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost("its process ended, or is being connected again")
        return decoded(_to_holder.decode, data)

    def _hello(self, callers: list[socket.socket], deadline: float, timeout_s: float) -> Hello | None:
        """Accept one connection, or read one message of `callers`. Returns the hello if it is the rank's."""
        caller = self._wait([self._listener, *callers], deadline, "hello", timeout_s)
        if caller is self._listener:
            callers.append(self._listener.accept()[0])
            return None
        callers.remove(caller)
        try:
            hello = decoded(_to_holder.decode, caller.recv(_MAX_NBYTES))
            if isinstance(hello, Hello) and hmac.compare_digest(hello.secret, self.ticket.secret):
                self._connection = caller
                return hello
            logger.warning("[%s] refused a process without the run's secret", self._trainer)
        except (OSError, WireError) as error:
            logger.warning("[%s] refused a process: %s", self._trainer, error)
        caller.close()
        return None

    def _wait(
        self, sockets: Sequence[socket.socket], deadline: float, phase: str, timeout_s: float
    ) -> socket.socket:
        """Return the first of `sockets` with a message. Raises the errors of `wait`."""
        while True:
            if self._aborted.is_set():
                raise TransportError(self._cause)
            left = deadline - time.monotonic()
            # Look once more after the deadline: perhaps this process was stopped, not the trainer.
            if ready := _first(sockets, max(0.0, min(left, _POLL_S))):
                return ready
            if left <= 0:
                raise DeadlineError(phase, (self._trainer,), timeout_s)

    def _lost(self, cause: object) -> PeerLostError:
        return PeerLostError(self._trainer, str(cause))


class PushEnd:
    """The trainer rank's end."""

    def __init__(self, ticket: PushTicket, plan_digest: str, ring: tuple[Handle, ...]) -> None:
        """Connect, and say hello. Raises PeerLostError if the holder is gone."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(ticket.endpoint)
            self._socket.send(msgspec.msgpack.encode(Hello(ticket.secret, plan_digest, ring)))
        except OSError as error:
            self._socket.close()
            raise PeerLostError("its holder", f"{ticket.endpoint}: {error}") from error

    def has_ask(self) -> bool:
        """Return True if `receive` would not wait."""
        return _first([self._socket], 0) is not None

    def receive(self) -> Push | None:
        """Return the next request, or None if either end closed the connection.

        Closes the connection if another message comes.
        """
        try:
            data = self._socket.recv(_MAX_NBYTES)
            return decoded(_to_trainer.decode, data) if data else None
        except OSError:
            return None
        except WireError as error:
            logger.warning("the connection to the holder ends: %s", error)
            self.hang_up()
            return None

    def answer(self, ticket: int, cause: str = "") -> None:
        """Tell the holder that the push of `ticket` is done, or why not. The holder may have ended."""
        with suppress(OSError):  # `receive` will say so
            self._socket.send(msgspec.msgpack.encode(Pushed(ticket, cause[:4096])))

    def hang_up(self) -> None:
        """End the connection, and a `receive` in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may use it any more."""
        self._socket.close()


def _first(sockets: Sequence[socket.socket], timeout_s: float) -> socket.socket | None:
    """Return the first of `sockets` with a message, a new connection or a lost connection."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = dict(poll.poll(timeout_s * 1000))
    return next((each for each in sockets if each.fileno() in ready), None)
