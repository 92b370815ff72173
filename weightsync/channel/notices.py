"""A trainer rank's notices to its driver, sent while it publishes."""

from __future__ import annotations

import threading
from contextlib import suppress

import msgspec
import zmq

from weightsync.channel.control import MAX_FRAME_NBYTES, ControlOffer, Readable
from weightsync.protocol.handshake import dial, hang_up


class Notices:
    """Tells the driver that holders may read this rank's weights, before `publish` returns.

    Without a connection nothing is sent. Holders then read once the driver has the answer of `publish`.
    """

    def __init__(self, offer: ControlOffer) -> None:
        """Dial, without waiting for the connection."""
        self._offer = offer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()  # an actor may run its calls on several threads
        self._socket, self._monitor = self._dial()

    def readable(self, ticket: int) -> None:
        """Say that the weights of `publish` number `ticket` may be read. Dials again if it has to."""
        with self._lock:
            if self._monitor.poll(0):
                hang_up(self._socket, self._monitor)
                self._socket, self._monitor = self._dial()
            with suppress(zmq.Again):
                self._socket.send(
                    msgspec.msgpack.encode(Readable(self._offer.number, ticket)), flags=zmq.NOBLOCK
                )

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            hang_up(self._socket, self._monitor)
            self._context.term()

    def _dial(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return dial(self._context, self._offer.endpoint, self._offer.secret, MAX_FRAME_NBYTES)
