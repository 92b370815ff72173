"""A socket of ZeroMQ that is closed with its owner, also if nobody closes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    Socket = zmq.Socket[bytes]


def own_socket(owner: object, kind: int, max_nbytes: int) -> tuple[Socket, Callable[[], object]]:
    """Return a socket in a context of its own, and a function that closes both. Safe to call twice.

    Both are closed when `owner` is collected, too. Python's collector of garbage might end the context before
    the socket, and wait for the socket forever.
    """
    context = zmq.Context(io_threads=1)
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_nbytes)
    close = weakref.finalize(owner, _close, context, socket)
    close.atexit = False  # a thread may still use it
    return socket, close


def _close(context: zmq.Context[Socket], socket: Socket) -> None:
    socket.close()
    context.term()
