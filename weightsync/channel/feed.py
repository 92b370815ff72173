"""The channel between a holder and an engine rank: shared memory and a socket.

The holder issues a ticket; the engine rank maps the ticket's buffers and says hello on its socket.
Then, inside one long call per update, the holder says which bucket is ready, and the engine rank answers
when the bucket was read. A holder that writes the rank's memory itself only says when all is written.

The socket's file is in a private directory, which is removed as soon as the engine rank is connected, so that
nothing is left behind.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import zmq

from weightsync import faults
from weightsync.channel.casting import Casting, CastingSink
from weightsync.channel.private_socket import PrivateDirectory, own_socket
from weightsync.channel.sink import PieceView, Sink
from weightsync.channel.wire import (
    MAX_MESSAGE_NBYTES,
    Cancel,
    Done,
    Failed,
    FeedHello,
    FeedWelcome,
    GoingOn,
    Message,
    Ready,
    Writable,
    Written,
    decode,
    encode,
)
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    TransportError,
    WeightSyncError,
    WireError,
)
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.digests import warm_up
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.decoding import decoded
from weightsync.protocol.descriptors import shortage
from weightsync.protocol.handles import BufferHandle, Handle
from weightsync.protocol.messages import Digests, FeedTicket, HolderDigests
from weightsync.protocol.timing import PhaseClock, Span

logger = logging.getLogger("weightsync.channel")

_POLL_MS = 50
_LATE_MS = 1000
END_S = 5.0
_NUM_SPARE = 4  # file descriptors: for the engine rank, and for unknown processes that connect first


class HolderFeed:
    """The holder's end. Used by one thread at a time, except for `drop`, which any thread may call.

    Raises PeerError, with the holder's name, if no file descriptors are left for the engine rank.
    """

    def __init__(
        self,
        holder: str,
        engine: str,
        slots: tuple[Handle, ...],
        send_buffer: BufferHandle | None,
        trainer: int,
    ) -> None:
        self._directory = PrivateDirectory()
        endpoint = f"ipc://{self._directory.path}/feed"
        self.ticket = FeedTicket(
            holder, engine, endpoint, secrets.token_bytes(32), slots, send_buffer, trainer
        )
        self._socket, self._close_socket = own_socket(self, zmq.ROUTER, MAX_MESSAGE_NBYTES)
        self._socket.bind(endpoint)
        self._peer: bytes | None = None
        self._writable = False
        self._early = deque[tuple[bytes, Message]]()
        self._dropped = threading.Event()
        self._check_descriptors()

    def accept(self, plan_digest: str, timeout_s: float) -> None:
        """Wait for the engine rank's hello, and remove the socket's file.

        Raises DeadlineError if the hello does not come, WireError if the rank has another plan, PeerError if
        this process has no file descriptor left: the engine rank then gives up too.
        """
        deadline = time.monotonic() + timeout_s
        while self._peer is None:
            sender, message = self._receive(deadline, "hello", timeout_s, self._check_descriptors)
            if not isinstance(message, FeedHello) or not hmac.compare_digest(
                message.secret, self.ticket.secret
            ):
                logger.warning("[%s] refused a peer without the run's secret", self.ticket.holder)
            elif message.plan_digest != plan_digest:
                raise WireError(
                    f"engine {message.engine} holds plan {message.plan_digest}, not {plan_digest}"
                )
            else:
                self._peer = sender
                self.send(FeedWelcome(self.ticket.holder))
        self._directory.remove()

    def send(self, message: Message) -> None:
        """Send a message to the engine rank, which `accept` has met."""
        assert self._peer is not None
        self._socket.send_multipart([self._peer, encode(message)])

    def written(self, attempt: int, by_holder: HolderDigests | None = None) -> None:
        """Tell the engine rank that all further buckets are in memory, with the holder's digests."""
        if by_holder is None:
            self.send(Written(attempt))
            return
        digests = by_holder.wholes.tobytes(), by_holder.stored.tobytes()
        self.send(Written(attempt, *digests, by_holder.are_parts))

    def is_writable(self) -> bool:
        """Return True if the engine rank has allowed quantised bytes in the exported memory."""
        while not self._writable and self._socket.poll(0):
            if came := self._take():
                self._early.append(came)
        return self._writable

    @property
    def dropped(self) -> bool:
        """Return True if the engine rank was given up."""
        return self._dropped.is_set()

    def wait_done(self, attempt: int, bucket: int, timeout_s: float) -> None:
        """Wait until the engine rank has read a bucket.

        Raises EngineError if the rank reported a failure or was dropped, DeadlineError if it is silent.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            _, message = self._receive(deadline, f"reading of bucket {bucket}", timeout_s)
            if isinstance(message, Failed) and message.attempt == attempt:
                raise EngineError(self.ticket.engine, "move", message.cause)
            if message == Done(attempt, bucket):
                return

    def drop(self) -> None:
        """Give up the engine rank: current and later waits for the rank end at once."""
        self._dropped.set()
        self._directory.remove()

    def close(self) -> None:
        """Close the socket and remove the socket's directory."""
        self.drop()
        self._close_socket()

    def _check_descriptors(self) -> None:
        if short := shortage(_NUM_SPARE):
            self.close()
            raise PeerError(self.ticket.holder, short)

    def _receive(
        self, deadline: float, phase: str, timeout_s: float, idle: Callable[[], None] = lambda: None
    ) -> tuple[bytes, Message]:
        while True:
            if self._dropped.is_set():
                raise EngineError(self.ticket.engine, phase, "it was given up")
            if self._early:
                return self._early.popleft()
            left = deadline - time.monotonic()
            # Poll once more after the deadline: perhaps this process was stopped, not the engine.
            if not self._socket.poll(max(0, int(min(left * 1000 + 1, _POLL_MS)))):
                if left <= 0:
                    raise DeadlineError(phase, (f"engine {self.ticket.engine}",), timeout_s)
                idle()
            elif came := self._take():
                return came

    def _take(self) -> tuple[bytes, Message] | None:
        """Receive a message. Returns None if it was refused, or if it was `Writable`."""
        frames = self._socket.recv_multipart()
        known = self._peer in (None, frames[0])
        try:
            message = decode(frames[-1]) if known and len(frames) == 2 else None
        except WireError as error:
            logger.warning("[%s] refused %d bytes: %s", self.ticket.holder, len(frames[-1]), error)
            return None
        if message is None:
            logger.warning("[%s] refused %d frames of an unknown peer", self.ticket.holder, len(frames))
        elif isinstance(message, Writable):
            self._writable = self._peer == frames[0]
        else:
            return frames[0], message
        return None


class EngineFeed:
    """The engine rank's end: mapped buffers and a connected socket. Used by one thread at a time.

    Attributes:
        spans: of the last `receive`: ``load``, with waits for buckets and the loader, and ``verify``.
        casts: True if sinks get pieces that are cast to the rank's dtypes. Slots have the dtypes that travel.
        plan_digest: the plan's digest.
    """

    @collector_paused
    def __init__(
        self,
        ticket: FeedTicket,
        plan: Plan,
        layout: RankLayout | None = None,
        busy: threading.Lock | None = None,
    ) -> None:
        self._ticket = ticket
        self._casting = Casting(plan, layout) if layout and _differ(plan, layout) else None
        self.casts, self.plan_digest = self._casting is not None, plan.digest()
        self.spans: Sequence[Span] = ()
        self._slots = tuple(
            SharedBuffer.open(handle) if isinstance(handle, BufferHandle) else DeviceBuffer.open(handle)
            for handle in ticket.slots
        )
        self._send_buffer = SharedBuffer.open(ticket.send_buffer) if ticket.send_buffer else None
        self._busy = busy or threading.Lock()
        self._closing = threading.Event()
        self._num_buckets, buckets = plan.num_buckets, range(plan.num_buckets if self._slots else 0)
        slots, trainer = [slot.tensor for slot in self._slots], ticket.trainer
        args = [(plan, index, slots[index % len(slots)], trainer) for index in buckets]
        self._buckets = [_views(*each, self._send_buffer) for each in args]
        # A refill reads only slots: the send buffer may already hold the trainer's next version.
        self._whole = self._buckets
        if self._send_buffer:
            self._whole = [_views(*each, None) for each in args]
        self._socket, self._close_socket = own_socket(self, zmq.DEALER, MAX_MESSAGE_NBYTES)
        self._socket.connect(ticket.endpoint)

    @classmethod
    def open(
        cls,
        ticket: FeedTicket,
        plan: Plan,
        timeout_s: float,
        layout: RankLayout | None = None,
        busy: threading.Lock | None = None,
    ) -> EngineFeed:
        """Map the buffers, connect and exchange the first messages, within `timeout_s` in all.

        With the rank's `layout`, sinks get pieces in the dtypes of the layout. All feeds of a rank that
        loads on several threads share `busy`: a load of an earlier feed, which may still write, has it.

        Raises PeerLostError, DeadlineError, EngineError if this process has no file descriptor left, or
        TransportError if the holder gave up this rank.
        """
        deadline = time.monotonic() + timeout_s  # the driver's is about the same
        try:
            feed = cls(ticket, plan, layout, busy)
        except PeerLostError as error:  # names a process; the caller knows holders
            raise PeerLostError(ticket.holder, error.cause) from error
        feed._send(FeedHello(ticket.secret, ticket.engine, feed.plan_digest))
        try:
            if any(isinstance(handle, BufferHandle) for handle in ticket.slots):
                warm_up()  # weights on a device are digested there
            _await_welcome(feed._socket, ticket, deadline, timeout_s)
        except BaseException:
            feed.close()
            raise
        return feed

    @property
    def slots(self) -> tuple[torch.Tensor, ...]:
        """The bucket slots: uint8, one dimension, on the holder's device."""
        return tuple(slot.tensor for slot in self._slots)

    @property
    def views(self) -> Sequence[Sequence[PieceView]]:
        """The buckets that `receive` passes to `Sink.take`: the same objects in every update.

        Empty if `casts` is True.
        """
        if self.casts:
            return ()
        return [*self._buckets, *(self._whole if self._send_buffer else ())]

    def allow_writing(self) -> None:
        """Allow the holder to write quantised bytes into this rank's exported memory, see `Writable`."""
        self._send(Writable())

    def refuse(self, attempt: int, error: WeightSyncError) -> None:
        """Tell the holder why this rank reads no bucket of an attempt. Called instead of `receive`."""
        if self._busy.acquire(blocking=False):  # otherwise an earlier load uses the socket
            try:
                self._send(Failed(attempt, f"{type(error).__name__}: {error}"))
            finally:
                self._busy.release()

    def receive(self, attempt: int, sink: Sink, timeout_s: float) -> Digests:
        """Pass every bucket of one attempt to `sink`, in one long call.

        Returns ``sink.digests()``. Raises DeadlineError if the holder sends nothing for `timeout_s`,
        TransportError if the holder gave up, EngineError for other errors of `sink`. The holder is told of
        any error, so that it stops waiting, except while an earlier load still runs.
        """
        # An earlier load that was given up may still be writing a bucket.
        if not self._busy.acquire(timeout=timeout_s):
            raise EngineError(self._ticket.engine, "move", "an earlier load has not ended yet")
        clock = PhaseClock()
        self.spans = clock.spans
        if self._casting is not None:
            sink = CastingSink(sink, self._casting)
        try:
            with clock.phase("load"):
                self._take_all(attempt, sink, timeout_s)
                sink.finish()
            with clock.phase("verify"):
                if faults.active:
                    faults.inject("verify")
                return sink.digests()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            self._send(Failed(attempt, cause))
            if isinstance(error, WeightSyncError):
                raise
            raise EngineError(self._ticket.engine, "move", cause) from error
        finally:
            self._busy.release()

    def _take_all(self, attempt: int, sink: Sink, timeout_s: float) -> None:
        for expected in range(max(self._num_buckets, 1)):  # without buckets the holder writes all
            ready = self._wait_ready(attempt, expected, timeout_s)
            if isinstance(ready, Written):
                sink.written(_digests(ready))
                return
            views = (self._whole if ready.whole else self._buckets)[expected]
            dropped = faults.active is not None and _inject(
                ready, self._num_buckets, views, self._whole[expected]
            )
            sink.take(expected, views)
            if not dropped:
                self._send(Done(attempt, expected))

    def close(self) -> None:
        """End a load that is still waiting, close the socket and unmap. Safe to call twice."""
        self._closing.set()
        if not self._busy.acquire(timeout=END_S):
            # A copy still uses the memory, so it stays mapped.
            logger.warning("[engine %s] a load does not end: its connection stays open", self._ticket.engine)
            return
        try:
            self._close_socket()
            self._buckets.clear()
            self._whole.clear()
            for buffer in (*self._slots, *([self._send_buffer] if self._send_buffer else [])):
                buffer.close()
        finally:
            self._busy.release()

    def _wait_ready(self, attempt: int, bucket: int, timeout_s: float) -> Ready | Written:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(deadline, f"bucket {bucket}", timeout_s)
            if isinstance(message, Cancel) and message.attempt == attempt:
                raise TransportError(f"{self._ticket.holder} gave up: {message.cause}")
            # Messages of an earlier, abandoned attempt are skipped.
            if isinstance(message, GoingOn) and message.attempt == attempt:
                deadline = time.monotonic() + timeout_s
            if isinstance(message, Written) and message.attempt == attempt:
                return message
            if isinstance(message, Ready) and (message.attempt, message.bucket) == (attempt, bucket):
                return message

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def _receive(self, deadline: float, phase: str, timeout_s: float) -> Message:
        while True:
            left = deadline - time.monotonic()
            came = self._socket.poll(max(0, int(min(left * 1000 + 1, _POLL_MS))))
            if self._closing.is_set():  # another load may own the memory by now
                raise TransportError(f"{self._ticket.engine} is being connected again")
            if came:
                return decode(self._socket.recv())
            if left <= 0:
                raise DeadlineError(phase, (self._ticket.holder,), timeout_s)


def _await_welcome(socket: zmq.Socket[bytes], ticket: FeedTicket, deadline: float, timeout_s: float) -> None:
    path = Path(ticket.endpoint.removeprefix("ipc://"))
    while not socket.poll(_POLL_MS):
        # The holder removes the file when it gives up, and after its welcome.
        if not path.exists() and not socket.poll(_LATE_MS):
            raise TransportError(f"{ticket.holder} gave up {ticket.engine}")
        if short := shortage():
            raise EngineError(ticket.engine, "attach", short)
        if time.monotonic() > deadline:
            raise DeadlineError("welcome", (ticket.holder,), timeout_s)
    decode(socket.recv())


def _views(
    plan: Plan, index: int, slot: torch.Tensor, trainer: int, send_buffer: SharedBuffer | None
) -> list[PieceView]:
    """Return views of a bucket's pieces. Their addresses are the same in every update."""
    views = []
    for piece in plan.bucket(index).pieces:
        memory, at = slot, piece.offset
        if send_buffer is not None and piece.trainer == trainer:
            memory, at = send_buffer.tensor, piece.send_buffer_offset
        dtype: torch.dtype = getattr(torch, plan.tensors[piece.tensor].dtype)
        views.append(
            (piece.tensor, piece.box, memory[at : at + piece.nbytes].view(dtype).view(piece.box.extent))
        )
    return views


def _inject(ready: Ready, num_buckets: int, views: list[PieceView], whole: list[PieceView]) -> bool:
    """Inject faults. ``corrupt`` changes a piece in the slot, never a piece in the send buffer."""
    both = zip(views, whole, strict=True)
    data = next((v[2] for v, slot in both if v[2].data_ptr() == slot[2].data_ptr()), None)
    at = "refill" if ready.whole else "move"
    return faults.inject(at, bucket=ready.bucket, num_buckets=num_buckets, data=data)


def _differ(plan: Plan, layout: RankLayout) -> bool:
    """Return True if a tensor travels in another dtype than the rank's."""
    dtypes = {meta.name: meta.dtype for meta in layout.tensors}
    return any(dtypes.get(meta.name, meta.dtype) != meta.dtype for meta in plan.tensors)


def _digests(written: Written) -> HolderDigests | None:
    if not written.wholes:
        return None
    wholes, stored = (decoded(_words, each, "digests") for each in (written.wholes, written.stored))
    return HolderDigests(wholes, stored, written.are_parts)


def _words(data: bytes) -> Digests:
    return np.frombuffer(data, np.uint64)
