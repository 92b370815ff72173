"""Lets only those into a ZeroMQ socket that know its secret, the password of ZeroMQ's PLAIN handshake.

A stranger gets nothing in but a handshake. Neither the secret nor what follows is encrypted.
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
"""A peer that has not shown the secret by then is disconnected, and its descriptor is free again."""
BACKLOG = 4096
_USER = "peer"

_log = logging.getLogger("weightsync.handshake")
_log.setLevel(logging.WARNING)  # at DEBUG, pyzmq's authenticator logs passwords


class Doorman:
    """Checks the handshakes of a context's sockets, in a thread of its own."""

    def __init__(self, context: Context) -> None:
        self.secret = secrets.token_hex(32)
        self._authenticator = ThreadAuthenticator(context, log=_log)
        self._authenticator.configure_plain(passwords={_USER: self.secret})
        self._authenticator.start()

    def guard(self, socket: Socket) -> None:
        """Ask for the secret at `socket`; call it before `socket` is bound."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)

    def close(self) -> None:
        """Let nobody in any more. Call it before the context ends; safe to call twice."""
        self._authenticator.stop()


def show_secret(socket: Socket, secret: str) -> None:
    """Show `secret` when `socket` connects; call it before."""
    socket.setsockopt_string(zmq.PLAIN_USERNAME, _USER)
    socket.setsockopt_string(zmq.PLAIN_PASSWORD, secret)
