"""Serves one buffer over ZeroMQ to who shows its secret.

Request: secret, header. Answer: header, data; or header, nothing, the cause of a refusal. A header is
ticket, offset and nbytes, 8 bytes each, little-endian.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from weightsync.errors import TransportError
from weightsync.readers.base import Offer, host_id

if TYPE_CHECKING:
    from weightsync.memory import SharedBuffer

__all__ = ["HEADER", "ZeroMqServer"]

HEADER = struct.Struct("<QQQ")
MAX_REQUEST_NBYTES = 1 << 10


class ZeroMqServer:
    """Answers in a thread of its own."""

    def __init__(self, buffer: SharedBuffer, holder: str, host: str) -> None:
        """Raises TransportError when `host` is no address of this host."""
        self._view = buffer.tensor.numpy().data
        self._secret = secrets.token_bytes(32)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # readers bound it by their window
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_NBYTES)
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransportError(f"{holder} cannot serve on {host}: {error}") from error
        self.offer = Offer(
            holder=holder,
            protocol="zeromq",
            memory=buffer.handle,
            host_id=host_id(),
            endpoint=self._socket.getsockopt_string(zmq.LAST_ENDPOINT),
            secret=self._secret,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weightsync-serve")
        self._thread.start()

    def close(self) -> None:
        """As `Server.close`."""
        self._context.term()  # ends the thread, which closes the socket
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                peer, *request = self._socket.recv_multipart()
                self._socket.send_multipart([peer, *self._answer(request)], copy=False)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)

    def _answer(self, request: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        if len(request) != 2 or len(request[1]) != HEADER.size:
            return [bytes(HEADER.size), b"", b"this is no request"]
        secret, header = request
        _, offset, nbytes = HEADER.unpack(header)
        if not hmac.compare_digest(secret, self._secret):
            return [header, b"", b"the secret is wrong"]
        if offset + nbytes > len(self._view):
            cause = f"{nbytes} bytes from {offset} on, of the {len(self._view)} that it has"
            return [header, b"", cause.encode()]
        return [header, self._view[offset : offset + nbytes]]
