"""Lets any thread close a reader: ends the read, waits, then releases."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightsync.errors import TransportError


class Ending:
    """The shared state of a reader's `read` and `close`.

    `fd` (an eventfd) becomes readable at the end and stays so, for reads that poll.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` is called once, when no read is running and none can start."""
        self._release = release
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._over = False
        self.fd = os.eventfd(0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the body as the only read. Raises TransportError after the end."""
        with self._reading:
            self.check()
            yield

    def check(self) -> None:
        """Raise TransportError after the end."""
        if self._over:
            raise TransportError("the reader is closed")

    def end(self) -> None:
        """End the read and release everything. Must not be called by the reading thread."""
        with self._lock:
            first, self._over = not self._over, True
            if first:
                os.eventfd_write(self.fd, 1)
        with self._reading:
            if first:
                self._release()
                os.close(self.fd)
