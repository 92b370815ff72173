"""A trainer rank's notices to the driver during `publish`."""

from __future__ import annotations

import threading

import msgspec

from weightsync.channel.control import MAX_FRAME_NBYTES, ControlOffer, Published, Readable, pack
from weightsync.protocol.messages import PublishReport
from weightsync.protocol.stream import Stream

_DIAL_S = 1.0
"""Time to connect, and then for the driver to make room for a notice."""
_AGAIN_S = 0.1
"""The same time if the connection is lost while the rank publishes."""


class Notices:
    """Tells the driver that holders may read this rank's weights, and later the report of `publish`.

    Without a connection nothing is sent. The driver then waits for Ray's answer of `publish`.
    """

    def __init__(self, offer: ControlOffer) -> None:
        """Dial. If nobody answers, no error is raised."""
        self._offer = offer
        self._lock = threading.Lock()  # an actor may run its calls on several threads
        self._stream = self._dial(_DIAL_S)

    def readable(self, ticket: int) -> None:
        """Tell that the weights of `publish` number `ticket` may be read. Dials again if needed."""
        self._send(Readable(ticket))

    def published(self, ticket: int, report: PublishReport) -> None:
        """Send the report of `publish` number `ticket`. Dials again if needed."""
        self._send(Published(ticket, pack(report)))

    def _send(self, notice: Readable | Published) -> None:
        data = msgspec.msgpack.encode(notice)
        if len(data) > MAX_FRAME_NBYTES:
            return  # a report that names many tensors with NaN comes with Ray's answer
        with self._lock:
            if self._stream and self._stream.is_lost():
                self._stream.close()
                self._stream = self._dial(_AGAIN_S)
            if self._stream is None:
                return
            try:
                self._stream.send(data)
            except OSError:
                self._stream.close()
                self._stream = None

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            if self._stream:
                self._stream.close()
            self._stream = None

    def _dial(self, timeout_s: float) -> Stream | None:
        try:
            return Stream(self._offer.endpoint, self._offer.secret, MAX_FRAME_NBYTES, timeout_s)
        except OSError:
            return None  # later notices fail too: the next connect of the driver makes this rank dial again
