"""Serves one buffer over ZeroMQ to peers that show its secret.

A request is one frame, a `Request`. An answer is an `Answer`, then a frame of data unless it refuses.
Secrets are checked as in `weightsync.protocol.handshake`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import zmq

from weightsync.errors import TransportError, WireError
from weightsync.protocol.handles import Offer
from weightsync.protocol.handshake import Doorman
from weightsync.readers.base import host_id

if TYPE_CHECKING:
    from weightsync.memory.host import SharedBuffer

__all__ = ["Answer", "Request", "ZeroMqServer", "read"]

MAX_FRAME_NBYTES = 256
"""Limit for a request and for each step of the handshake."""

T = TypeVar("T")
Natural = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Reader → server: send `nbytes` bytes from `offset` on, with this `ticket`."""

    ticket: Natural
    offset: Natural
    nbytes: Natural


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Server → reader: the data of `ticket` follows, or a `refusal` without data."""

    ticket: Natural
    refusal: str = ""


class ZeroMqServer:
    """A thread that answers requests, and another one that checks secrets."""

    def __init__(self, buffer: SharedBuffer, holder: str, host: str) -> None:
        """Raises TransportError when `host` is not an address of this host."""
        self._view = buffer.tensor.numpy().data
        self._context = zmq.Context()
        self._doorman = Doorman(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._doorman.guard(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the readers' window limits the queue
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._doorman.close()
            self._context.destroy(linger=0)
            raise TransportError(f"{holder} cannot serve on {host}: {error}") from error
        self.offer = Offer(
            holder=holder,
            protocol="zeromq",
            memory=buffer.handle,
            host_id=host_id(),
            endpoint=self._socket.getsockopt_string(zmq.LAST_ENDPOINT),
            secret=self._doorman.secret,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weightsync-serve")
        self._thread.start()

    def close(self) -> None:
        """Stop both threads, as `Server.close` says."""
        self._doorman.close()
        self._context.term()  # ends the thread, which closes the socket
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                self._socket.send_multipart([peer, *self._answer(frames)], copy=False)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)

    def _answer(self, frames: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        try:
            request = read(Request, frames)
        except WireError as error:
            return [msgspec.msgpack.encode(Answer(0, str(error)))]
        start, end = request.offset, request.offset + request.nbytes
        if end > len(self._view):
            refusal = f"{request.nbytes} bytes from {start} on, of the {len(self._view)} that it has"
            return [msgspec.msgpack.encode(Answer(request.ticket, refusal))]
        return [msgspec.msgpack.encode(Answer(request.ticket)), self._view[start:end]]


def read(kind: type[T], frames: Sequence[bytes | memoryview]) -> T:
    """Decode a `Request` or an `Answer` from its one frame. Raises WireError for anything else."""
    if len(frames) != 1:
        raise WireError(f"{len(frames)} frames, where a message of ours is 1")
    try:
        return msgspec.msgpack.decode(frames[0], type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of ours: {error}") from error
