"""A trainer rank's notices to its driver, sent while it publishes."""

from __future__ import annotations

import threading
from contextlib import suppress

import msgspec
import zmq

from weightsync.channel.control import MAX_FRAME_NBYTES, ControlOffer, Published, Readable, pack
from weightsync.protocol.handshake import dial, hang_up
from weightsync.protocol.messages import PublishReport

_open: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""Contexts of notices that were not closed. Garbage collection, as when an actor exits, would end a context
before it closes its sockets, and wait for that for ever."""


class Notices:
    """Tells the driver that holders may read this rank's weights, and then what `publish` returns.

    Without a connection nothing is sent. The driver then waits for Ray's answer of `publish`.
    """

    def __init__(self, offer: ControlOffer) -> None:
        """Dial, without waiting for the connection."""
        self._offer = offer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        _open.add(self._context)
        self._lock = threading.Lock()  # an actor may run its calls on several threads
        self._socket, self._monitor = self._dial()

    def readable(self, ticket: int) -> None:
        """Say that the weights of `publish` number `ticket` may be read. Dials again if it has to."""
        self._send(Readable(self._offer.number, ticket))

    def published(self, ticket: int, report: PublishReport) -> None:
        """Say what `publish` number `ticket` returns. Dials again if it has to."""
        self._send(Published(self._offer.number, ticket, pack(report)))

    def _send(self, notice: Readable | Published) -> None:
        data = msgspec.msgpack.encode(notice)
        if len(data) > MAX_FRAME_NBYTES:
            return  # it names many tensors with NaN, and comes with Ray's answer
        with self._lock:
            if self._monitor.poll(0):
                hang_up(self._socket, self._monitor)
                self._socket, self._monitor = self._dial()
            with suppress(zmq.Again):
                self._socket.send(data, flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            hang_up(self._socket, self._monitor)
            self._context.term()
            _open.discard(self._context)

    def _dial(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return dial(self._context, self._offer.endpoint, self._offer.secret, MAX_FRAME_NBYTES)
