"""Python's garbage collector, which stands still while objects are made for each tensor or peer."""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator


class _Paused(ContextDecorator):
    """Pauses the collector of this process. Blocks may nest, and run in several threads.

    While tens of thousands of objects are made, it would look through all that the process has several times.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_blocks:
                self._was_on = gc.isenabled()
                gc.disable()
            self._num_blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_blocks -= 1
            if not self._num_blocks and self._was_on:
                gc.enable()


collector_paused = _Paused()
"""A context manager and a decorator, for updates and for work that takes a second."""
