"""Messages on a TCP connection, with their lengths. The process that dials first proves a secret.

The thread that sends a message gives it to the kernel, which wakes the thread that waits for it. ZeroMQ has
an extra thread at either end, and waking it takes long on an idle host.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from weightsync.config import TlsFiles
from weightsync.errors import WireError
from weightsync.protocol.proof import proof_of
from weightsync.protocol.routes import joined
from weightsync.protocol.tls import TlsSocket, dialling, wrapped

_LENGTH = struct.Struct("!I")
_CHUNK_NBYTES = 1 << 18


def framed(message: bytes) -> bytes:
    """Return the bytes that carry `message` on a stream."""
    return _LENGTH.pack(len(message)) + message


def endpoint_of(listening: socket.socket) -> str:
    """Return the endpoint to dial for a socket that listens."""
    host, port, *_ = listening.getsockname()
    return f"tcp://{joined(host, port)}"


def keep_alive(connection: socket.socket) -> None:
    """Have `connection` notice within two minutes if it was dropped on its way, also while it is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


class Splitter:
    """Cuts a stream into messages.

    Attributes:
        max_nbytes: of the next message.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.max_nbytes = max_nbytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that `data` ends. The caller may change the limit between two of them.

        Raises WireError as soon as the length of a message that is too long has come.
        """
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._rest)
            if nbytes > self.max_nbytes:
                raise WireError(f"a message of {nbytes} bytes, more than {self.max_nbytes}")
            end = _LENGTH.size + nbytes
            if len(self._rest) < end:
                return
            message = bytes(self._rest[_LENGTH.size : end])
            del self._rest[:end]
            yield message


class Stream:
    """A connection that this process has dialled. Used by one thread at a time.

    All methods raise OSError once it is lost. It is then of no more use.

    Attributes:
        own_address: this host's address on the network to the listener, without brackets.
    """

    def __init__(
        self, endpoint: str, secret: str, max_nbytes: int, timeout_s: float, tls: TlsFiles | None = None
    ) -> None:
        """Connect, and prove to know the secret.

        Args:
            endpoint: as `endpoint_of` returns it.
            max_nbytes: limit for each message that comes.
            timeout_s: for the connection, and for each message that is sent.
            tls: this process's files, if the listener speaks TLS.

        Raises:
            OSError: nobody listens there, or it takes longer.
            WireError: the listener is refused, see `wrapped`.
            ConfigError: a file of `tls` is bad.
        """
        where = urlsplit(endpoint)
        context = dialling(tls) if tls else None
        dialled = socket.create_connection((where.hostname or "", where.port or 0), timeout_s)
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(dialled)
        self.own_address = str(dialled.getsockname()[0])
        self._socket: socket.socket | TlsSocket = wrapped(dialled, context, endpoint) if context else dialled
        self._timeout_s = timeout_s
        self._splitter = Splitter(max_nbytes)
        self._came: Iterator[bytes] = iter(())
        try:
            self.send(proof_of(secret))
        except OSError:
            self.close()
            raise

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(framed(message))

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None if none has come by then. Raises WireError for one too long."""
        deadline = time.monotonic() + timeout_s
        while (message := next(self._came, None)) is None:
            if (data := self._read(deadline - time.monotonic())) is None:
                return None
            self._came = self._splitter.feed(data)
        return message

    def receive_many(self, timeout_s: float) -> list[bytes]:
        """Return the messages that came together, none if nothing came. Raises WireError as `receive`.

        Another thread may send meanwhile.
        """
        data = self._read(timeout_s)
        return list(self._splitter.feed(data)) if data else []

    def _read(self, timeout_s: float) -> bytes | None:
        """Return the next bytes, None if none came by then."""
        deadline = time.monotonic() + timeout_s
        ready = select.poll()  # another thread may set the socket's timeout, to send
        ready.register(self._socket, select.POLLIN)
        while ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            try:
                data = self._socket.recv(_CHUNK_NBYTES)
            except ssl.SSLWantReadError:  # half a record
                continue
            if not data:
                raise ConnectionResetError("the other end has hung up")
            return data
        return None

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Hang up. A thread that receives, or is about to, gets an error. `close` frees the descriptor."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, also while another thread receives. Safe to call twice."""
        self.shut()
        self._socket.close()
