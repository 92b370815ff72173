"""Seconds by phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["PhaseClock"]


class PhaseClock:
    """Wall clock of the phases of one piece of work; `seconds` keeps them in order."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time as `name`, also when it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - started

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started
