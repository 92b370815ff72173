"""Serves one buffer over ZeroMQ to peers that show its secret.

A request is one frame, a `Request`. An answer is an `Answer`, then a frame of data unless it refuses.
Secrets are checked as in `weightsync.protocol.handshake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from weightsync.config import Ports
from weightsync.errors import WireError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.protocol.handshake import Server, decode_one

MAX_FRAME_NBYTES = 256

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


requests = msgspec.msgpack.Decoder(Request)
answers = msgspec.msgpack.Decoder(Answer)


class ZeroMqServer(Server):
    """Answers requests for parts of one buffer."""

    def __init__(self, buffer: SharedBuffer, holder: str, host: str, ports: Ports | None) -> None:
        """Raises ConfigError or TransportError as `weightsync.protocol.ports.listen`."""
        self._view = buffer.tensor.numpy().data
        super().__init__(host, ports, MAX_FRAME_NBYTES, f"{holder} cannot serve")
        self.offer = Offer(
            holder=holder,
            protocol="zeromq",
            memory=buffer.handle,
            endpoint=self.endpoint,
            secret=self.secret,
        )

    def answer(self, frames: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the bytes that a request asks for, or a refusal."""
        try:
            request = decode_one(requests, frames)
        except WireError as error:
            return [msgspec.msgpack.encode(Answer(0, str(error)))]
        start, end = request.offset, request.offset + request.nbytes
        if end > len(self._view):
            refusal = f"{request.nbytes} bytes from {start} on, of the {len(self._view)} that it has"
            return [msgspec.msgpack.encode(Answer(request.ticket, refusal))]
        return [msgspec.msgpack.encode(Answer(request.ticket)), self._view[start:end]]
