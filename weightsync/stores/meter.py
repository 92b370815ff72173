"""Counts bytes that move, for a bar."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Tell = Callable[[int, int], None]
"""Is told the bytes that have moved, and all bytes that have to."""


def silent(done: int, total: int) -> None:
    """Tell nobody."""


class Meter:
    """Bytes that have moved, on any thread."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell, self._total, self.nbytes, self._lock = tell, total, 0, Lock()
        tell(0, total)

    def moved(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self._tell(self.nbytes, self._total)
