"""Round trip and rate of one TCP connection between two hosts."""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import statistics
import struct
import threading
import time
from dataclasses import dataclass
from functools import partial

from weightsync.config import Ports
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.ports import listen
from weightsync.protocol.routes import host_of, joined

SECRET_NBYTES = 16
NUM_PINGS = 20
SECONDS = 0.5
MAX_NBYTES = 1 << 30
"""A measurement ends after `SECONDS` or `MAX_NBYTES`."""
_CHUNK = 1 << 20
_PAUSE_S = 1.0
"""Seconds without accepting after an error."""
_REPLY = struct.Struct("!Qd")
_RESET = struct.pack("ii", 1, 0)
"""As SO_LINGER, drops unsent bytes, so that the next measurement finds a free link."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The measurement of one connection.

    Attributes:
        rtt_ms: median round trip of one byte, in milliseconds.
        gb_per_s: rate of the bytes that arrived, in 1e9 bytes per second.
        nbytes: the bytes that arrived while the rate was measured.
    """

    rtt_ms: float
    gb_per_s: float
    nbytes: int


class LinkServer:
    """Answers `measure` on one address, on a port of a range, until `close`."""

    def __init__(self, host: str, ports: Ports | None, secret: bytes, timeout_s: float) -> None:
        """`secret` has `SECRET_NBYTES` bytes; connections that do not begin with it are closed.

        Raises as `listen`.
        """
        self._socket = listen(host, ports, "no connections can be measured")
        self._socket.setblocking(True)
        self._secret, self._timeout_s, self._closing = secret, timeout_s, threading.Event()
        self.endpoint = joined(host, self._socket.getsockname()[1])
        on_daemon(self._accept, "weightsync-link-server")

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closing.wait(_PAUSE_S):
                    return
                continue  # this process had no descriptor left
            on_daemon(partial(self._serve, connection), "weightsync-link")

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            deadline = time.monotonic() + self._timeout_s
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(connection, SECRET_NBYTES, deadline), self._secret):
                return
            for _ in range(NUM_PINGS):
                connection.sendall(_receive(connection, 1, deadline))
            nbytes, seconds = _sink(connection, deadline)
            connection.sendall(_REPLY.pack(nbytes, seconds))
            while connection.recv(_CHUNK):  # until the other side has the reply
                _until(connection, deadline)


def measure(endpoint: str, secret: bytes, timeout_s: float) -> LinkRate:
    """Measure one connection to a `LinkServer`, for about `SECONDS` seconds.

    Raises OSError if the endpoint cannot be reached, or does not answer within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    address = host_of(endpoint), int(endpoint.rpartition(":")[2])
    with socket.create_connection(address, timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        _until(connection, deadline)
        connection.sendall(secret)
        rtt_s = statistics.median(_ping(connection, deadline) for _ in range(NUM_PINGS))
        nbytes, seconds = _REPLY.unpack(_send_until_reply(connection, deadline))
    return LinkRate(rtt_s * 1e3, nbytes / seconds / 1e9, nbytes)


def _ping(connection: socket.socket, deadline: float) -> float:
    began = time.perf_counter()
    connection.sendall(b".")
    _receive(connection, 1, deadline)
    return time.perf_counter() - began


def _send_until_reply(connection: socket.socket, deadline: float) -> bytes:
    """Send as fast as the connection takes it, until the server replies."""
    poll, chunk = select.poll(), bytes(_CHUNK)
    connection.setblocking(False)
    poll.register(connection, select.POLLIN | select.POLLOUT)
    while (left_s := deadline - time.monotonic()) > 0:
        for _, events in poll.poll(left_s * 1e3):
            if events & ~select.POLLOUT:
                return _receive(connection, _REPLY.size, deadline)
            with contextlib.suppress(BlockingIOError):
                connection.send(chunk)
    raise TimeoutError("timed out")


def _sink(connection: socket.socket, deadline: float) -> tuple[int, float]:
    """Receive until the measurement ends. Returns bytes and seconds after the first bytes came."""
    buffer = bytearray(_CHUNK)
    _until(connection, deadline)
    if not connection.recv_into(buffer):
        raise ConnectionError("closed")
    nbytes, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < SECONDS and nbytes < MAX_NBYTES:
        _until(connection, deadline)
        received = connection.recv_into(buffer)
        if not received:
            raise ConnectionError("closed")
        nbytes += received
    return nbytes, seconds


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = b""
    while len(received) < nbytes:
        _until(connection, deadline)
        part = connection.recv(nbytes - len(received))
        if not part:
            raise ConnectionError("closed by the other side")
        received += part
    return received


def _until(connection: socket.socket, deadline: float) -> None:
    """Limit the connection's next call to `deadline`. Raises TimeoutError after the deadline."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)
