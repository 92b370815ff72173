"""Serves peers over ZeroMQ that know a secret: the password of PLAIN, or the keys of CURVE.

Without the secret a peer can send nothing but a handshake. CURVE encrypts the traffic. PLAIN encrypts
nothing, and shows the password.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from weightsync.config import Ports
from weightsync.protocol.ports import listen
from weightsync.protocol.routes import joined

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]
    Socket = zmq.Socket[bytes]

HANDSHAKE_MS = 5000
"""A peer that has not shown the secret after this time is disconnected, which frees its descriptor."""
_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_USER = "peer"
_KEY_LENGTH = 40  # of a key of CURVE, as text
_MORE_NBYTES = 1024
"""More than CURVE needs for a step of its handshake, or adds to a frame."""

_log = logging.getLogger("weightsync.protocol")
_log.setLevel(logging.WARNING)  # at DEBUG, pyzmq's authenticator logs passwords


class HandshakeServer(ABC):
    """Answers requests on its own port in one thread, and checks secrets in another thread.

    Attributes:
        secret: the secret that peers have to know.
        endpoint: the address of the server.
    """

    def __init__(
        self, host: str, ports: Ports | None, max_nbytes: int, problem: str, *, encrypts: bool = False
    ) -> None:
        """
        Args:
            ports: the range of the port; by default any free port.
            max_nbytes: limit for a request's frame and for each step of the handshake.
            encrypts: use CURVE.

        Raises:
            ConfigError, TransportError: as `listen`.
        """
        listening = listen(host, ports, problem)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context, log=_log)
        self._socket = self._context.socket(zmq.ROUTER)
        self.secret = self._ask_for_keys() if encrypts else self._ask_for_password()
        self._authenticator.start()
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # peers limit how many messages wait for them
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes + encrypts * _MORE_NBYTES)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        port = listening.getsockname()[1]
        self._socket.setsockopt(zmq.USE_FD, listening.detach())
        self._socket.bind(f"tcp://{joined(host, port)}")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="weightsync-serve")
        self._thread.start()

    def close(self) -> None:
        """Stop both threads. Safe to call twice."""
        self._authenticator.stop()
        self._context.term()  # ends the thread, which closes the socket
        self._thread.join()

    def _ask_for_password(self) -> str:
        password = secrets.token_hex(32)
        self._authenticator.configure_plain(passwords={_USER: password})
        self._socket.setsockopt(zmq.PLAIN_SERVER, 1)
        return password

    def _ask_for_keys(self) -> str:
        """Let peers in that have one private key. Returns this server's public key, and that private key."""
        (public, private), (peers_public, peers_private) = zmq.curve_keypair(), zmq.curve_keypair()
        self._authenticator.configure_curve_callback(credentials_provider=_Only(peers_public))
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        return (public + peers_private).decode()

    @abstractmethod
    def answer(self, frames: Sequence[bytes]) -> Sequence[bytes | memoryview]:
        """Return the frames that answer a request's. Must not raise."""

    def _serve(self) -> None:
        try:
            while True:
                peer, *frames = self._socket.recv_multipart()
                self._socket.send_multipart([peer, *self.answer(frames)], copy=False)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(linger=0)


class _Only:
    """Lets in peers with one public key of CURVE."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def dial(
    context: Context, endpoint: str, secret: str, max_nbytes: int, *, encrypts: bool = False
) -> tuple[Socket, Socket]:
    """Connect to a `HandshakeServer` that `encrypts`, or does not. Answers have at most `max_nbytes` a frame.

    Returns the socket and a monitor. Any event on the monitor means that the connection is lost for good.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes + encrypts * _MORE_NBYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # another process may have the port by then
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    _keep_alive(socket)
    (use_keys if encrypts else show_secret)(socket, secret)
    monitor = socket.get_monitor_socket(_LOST)
    socket.connect(endpoint)
    return socket, monitor


def hang_up(socket: Socket, monitor: Socket) -> None:
    """Close the sockets of `dial`."""
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close()


def _keep_alive(socket: zmq.Socket[Any]) -> None:
    """Have `socket` notice within two minutes if an idle connection was dropped on its way.

    Must be called before the socket connects or binds.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)


def show_secret(socket: Socket, secret: str) -> None:
    """Have `socket` show `secret` when it connects. Must be called before it connects."""
    socket.setsockopt_string(zmq.PLAIN_USERNAME, _USER)
    socket.setsockopt_string(zmq.PLAIN_PASSWORD, secret)


def use_keys(socket: Socket, secret: str) -> None:
    """Have `socket` encrypt with the keys in `secret`. Must be called before it connects."""
    private = secret[_KEY_LENGTH:].encode()
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, secret[:_KEY_LENGTH])
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(private))
