"""Serves peers over ZeroMQ that show a secret, the password of PLAIN.

Without the secret a peer can send nothing but a handshake. Neither the secret nor the traffic is encrypted.
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

_log = logging.getLogger("weightsync.protocol")
_log.setLevel(logging.WARNING)  # at DEBUG, pyzmq's authenticator logs passwords


class Server(ABC):
    """Answers requests on its own port in one thread, and checks secrets in another thread.

    Attributes:
        secret: the secret that peers have to show.
        endpoint: the address of the server.
    """

    def __init__(self, host: str, ports: Ports | None, max_nbytes: int, problem: str) -> None:
        """
        Args:
            ports: the range of the port; by default any free port.
            max_nbytes: limit for a request's frame and for each step of the handshake.

        Raises:
            ConfigError, TransportError: as `listen`.
        """
        listening = listen(host, ports, problem)
        self.secret = secrets.token_hex(32)
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context, log=_log)
        self._authenticator.configure_plain(passwords={_USER: self.secret})
        self._authenticator.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # peers limit how many messages wait for them
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes)
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


def dial(context: Context, endpoint: str, secret: str, max_nbytes: int) -> tuple[Socket, Socket]:
    """Connect to a `Server`. Frames of answers may have at most `max_nbytes`.

    Returns the socket and a monitor. Any event on the monitor means that the connection is lost for good.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # another process may have the port by then
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    _keep_alive(socket)
    show_secret(socket, secret)
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
