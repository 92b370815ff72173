"""TLS 1.3 between hosts: both ends of a connection show a certificate of the run's CA."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time

from weightsync.config import TlsFiles
from weightsync.errors import WireError


def accepting(files: TlsFiles) -> ssl.SSLContext:
    """Return how a process accepts connections. Raises ConfigError for bad files."""
    return _context(files, ssl.PROTOCOL_TLS_SERVER)


def dialling(files: TlsFiles) -> ssl.SSLContext:
    """Return how a process dials. Raises ConfigError for bad files."""
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    """Return the context of one end. Raises ConfigError for bad files.

    Any certificate of the CA is accepted, whatever name it has: the CA is the run's own.
    """
    from weightsync.protocol.certificates import check  # imports a library that only TLS needs

    check(files)
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
    made.load_verify_locations(files.ca)
    made.load_cert_chain(files.certificate, files.key)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # each connection shows a certificate
    return made


def wrapped(dialled: socket.socket, context: ssl.SSLContext, endpoint: str) -> TlsSocket:
    """Shake hands on a socket that this process has dialled, within the socket's timeout.

    Raises WireError if one end refuses the other, and OSError if the other end hangs up.
    """
    with dialled:  # which is empty after the handshake
        try:
            return TlsSocket(context.wrap_socket(dialled), endpoint)
        except (ssl.SSLEOFError, ConnectionResetError):
            raise ConnectionResetError("it hung up on TLS: see whether sync.tls is set there") from None
        except ssl.SSLError as error:
            raise WireError(f"{endpoint} is refused: {refusal(error)}") from error


def refusal(error: OSError) -> str:
    """Return why a handshake failed, as a sentence about the other end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        known = {9: "its certificate is not valid yet", 10: "its certificate has expired"}
        return known.get(error.verify_code, f"its certificate is of another CA ({error.verify_message})")
    reason = getattr(error, "reason", None) or ""
    if _is_of_certificate(reason):
        return f"it refuses this process's certificate ({reason.lower().replace('_', ' ')})"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "NO_SHARED_CIPHER"):
        return "it does not speak TLS 1.3"
    return f"its handshake fails: {reason.lower().replace('_', ' ') or error}"


def _is_of_certificate(reason: str) -> bool:
    return "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)


class TlsSocket:
    """The socket of a process that has dialled. One thread may send while another one receives."""

    def __init__(self, shaken: ssl.SSLSocket, endpoint: str) -> None:
        """`shaken`: after its handshake with `endpoint`."""
        self._socket, self._endpoint, self._timeout_s = shaken, endpoint, 0.0
        self._lock = threading.Lock()  # OpenSSL's connections are of one thread at a time
        shaken.setblocking(False)

    def settimeout(self, timeout_s: float) -> None:
        """Give each `sendall` this time."""
        self._timeout_s = timeout_s

    def sendall(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError."""
        deadline, left = time.monotonic() + self._timeout_s, memoryview(data)
        while left:
            try:
                with self._lock:
                    left = left[self._socket.send(left) :]
            except ssl.SSLWantWriteError:
                ready = select.poll()
                ready.register(self._socket, select.POLLOUT)
                if not ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                    raise TimeoutError("timed out") from None

    def recv(self, nbytes: int) -> bytes:
        """Return what came, `nbytes` or a little more, b"" at the end. Raises SSLWantReadError for nothing.

        Raises WireError if the other end refuses this process's certificate, which it says after the
        handshake.
        """
        received = bytearray()
        try:
            with self._lock:
                while len(received) < nbytes and (data := self._socket.recv(nbytes)):
                    received += data
        except OSError as error:
            if not received and _is_of_certificate(getattr(error, "reason", None) or ""):
                raise WireError(f"{self._endpoint} is refused: {refusal(error)}") from error
            if not received:
                raise
        return bytes(received)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        """Hang up. What comes later is still taken for TLS."""
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Free the descriptor."""
        with self._lock:  # OpenSSL would read from another socket with the same descriptor
            self._socket.close()
