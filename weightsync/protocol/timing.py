"""Seconds by phase."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PhaseClock", "Span"]

logger = logging.getLogger("weightsync.protocol.timing")


@dataclass(frozen=True, slots=True)
class Span:
    """What one process did, and when.

    Attributes:
        began: seconds since 1970, as `PhaseClock.now` says: spans of one host compare to the microsecond
            if nobody set its clock between them, those of several as well as their clocks agree.
        seconds: by a clock that is never set.
    """

    name: str
    began: float
    seconds: float


class PhaseClock:
    """Times the phases of one piece of work; `spans` keeps them in order, the log tells each.

    The wall clock is read once, when this is made. All else is counted from there by a clock that is
    never set, so that stamps of one piece of work are as far apart as what they stand for.

    Attributes:
        began: seconds since 1970.
    """

    def __init__(self) -> None:
        self.began, self._started = time.time(), time.perf_counter()
        self.spans: list[Span] = []

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase that is over, together where it ran more than once."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time as `name`, also when it raises."""
        started = self.total()
        try:
            yield
        finally:
            self.spans.append(Span(name, self.began + started, self.total() - started))
            logger.debug("%s: %.3f s", name, self.spans[-1].seconds)

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    def now(self) -> float:
        """Seconds since 1970, by the wall clock as it was when this was made."""
        return self.began + self.total()
