"""Serves memory over ZeroMQ to peers that know the offer's secret.

A request is one frame, a `Request`. An answer is a `ReadReply`, followed by a frame of data unless refused.
Secrets are checked as in `weightsync.readers.zeromq_handshake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from weightsync.config import Ports
from weightsync.errors import WireError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.decoding import decoded_one
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.readers.base import Readable
from weightsync.readers.ways import ENCRYPTED
from weightsync.readers.zeromq_handshake import HandshakeServer

MAX_FRAME_NBYTES = 256
CHUNK_NBYTES = 1 << 20
"""The most bytes of one answer. Longer requests are refused."""

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Reader → server: send `nbytes` bytes from `offset` on, with this `ticket`."""

    ticket: Natural
    offset: Natural
    nbytes: Natural


class ReadReply(msgspec.Struct, frozen=True, array_like=True):
    """Server → reader: the data of `ticket` follows, or a `refusal` without data."""

    ticket: Natural
    refusal: str = ""


requests = msgspec.msgpack.Decoder(Request)
answers = msgspec.msgpack.Decoder(ReadReply)


class SharedMemory:
    """A shared buffer as `Readable`: answers are views."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._view = buffer.tensor.numpy().data

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def read(self, start: int, nbytes: int) -> memoryview:
        return self._view[start : start + nbytes]


class ZeroMqServer(HandshakeServer):
    """Answers requests for parts of `memory`."""

    def __init__(
        self,
        memory: Readable,
        handle: BufferHandle,
        holder: str,
        host: str,
        ports: Ports | None,
        protocol: str = "zeromq",
    ) -> None:
        """Start to serve, over "zeromq" or "curve". Processes of this host map the memory by `handle`.

        Raises ConfigError or TransportError, as `weightsync.protocol.ports.listen`.
        """
        self._memory = memory
        problem, encrypts = f"{holder} cannot serve", protocol == ENCRYPTED
        super().__init__(host, ports, MAX_FRAME_NBYTES, problem, encrypts=encrypts)
        self.offer = Offer(
            holder=holder, protocol=protocol, memory=handle, endpoint=self.endpoint, secret=self.secret
        )

    def answer(self, frames: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the requested bytes, or a refusal."""
        try:
            request = decoded_one(requests.decode, frames)
        except WireError as error:
            return [msgspec.msgpack.encode(ReadReply(0, str(error)))]
        start, nbytes = request.offset, request.nbytes
        if start + nbytes > self._memory.nbytes:
            return _refuse(
                request, f"{nbytes} bytes from {start} on, of the {self._memory.nbytes} that it has"
            )
        if nbytes > CHUNK_NBYTES:
            return _refuse(request, f"{nbytes} bytes at once, of at most {CHUNK_NBYTES}")
        try:
            data = self._memory.read(start, nbytes)
        except Exception as error:  # noqa: BLE001 - the device's errors too: the peer reads elsewhere then
            return _refuse(request, f"{type(error).__name__}: {error}")
        return [msgspec.msgpack.encode(ReadReply(request.ticket)), data]


def _refuse(request: Request, why: str) -> Sequence[bytes]:
    return [msgspec.msgpack.encode(ReadReply(request.ticket, why))]
