"""One read at a time, and a close from any thread that ends it and waits until it has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightsync.errors import TransportError

__all__ = ["Ending"]


class Ending:
    """The state that a reader and its close share.

    `fd` (an eventfd) becomes readable when the end comes, and stays so: for whoever polls.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` is called once, when no read is under way and none will be."""
        self._release = release
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._over = False
        self.fd = os.eventfd(0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The body is the one read that is under way. Raises TransportError after the end."""
        with self._reading:
            self.check()
            yield

    def check(self) -> None:
        """Raises TransportError after the end."""
        if self._over:
            raise TransportError("the reader is closed")

    def end(self) -> None:
        """Returns when everything is released. Not to be called by the thread that reads."""
        with self._lock:
            first, self._over = not self._over, True
            if first:
                os.eventfd_write(self.fd, 1)
        with self._reading:
            if first:
                self._release()
                os.close(self.fd)
