"""Admits peers to a ZeroMQ socket by a secret, the password of PLAIN.

Without the secret a peer can send nothing but a handshake. Neither the secret nor the traffic is encrypted.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import zmq
from zmq.auth.thread import ThreadAuthenticator

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]
    Socket = zmq.Socket[bytes]

__all__ = ["Doorman", "show_secret"]

HANDSHAKE_MS = 5000
"""A peer that has not shown the secret after this time is disconnected, which frees its descriptor."""
BACKLOG = 4096
_USER = "peer"

_log = logging.getLogger("weightsync.handshake")
_log.setLevel(logging.WARNING)  # at DEBUG, pyzmq's authenticator logs passwords


class Doorman:
    """Checks the handshakes of a context's sockets, in its own thread."""

    def __init__(self, context: Context) -> None:
        self.secret = secrets.token_hex(32)
        self._authenticator = ThreadAuthenticator(context, log=_log)
        self._authenticator.configure_plain(passwords={_USER: self.secret})
        self._authenticator.start()

    def guard(self, socket: Socket) -> None:
        """Require the secret at `socket`. Must be called before `socket` is bound."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)

    def close(self) -> None:
        """Admit no more peers. Must be called before the context ends; safe to call twice."""
        self._authenticator.stop()


def show_secret(socket: Socket, secret: str) -> None:
    """Have `socket` show `secret` when it connects. Must be called before it connects."""
    socket.setsockopt_string(zmq.PLAIN_USERNAME, _USER)
    socket.setsockopt_string(zmq.PLAIN_PASSWORD, secret)
