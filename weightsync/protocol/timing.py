"""Times the phases of a piece of work, and carries the deadline that the work has."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

logger = logging.getLogger("weightsync.protocol")


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of work in one process: name, start and duration.

    Attributes:
        began: seconds since 1970, by `PhaseClock.now`. Spans of one host compare to the microsecond unless
            the host's clock was set between them; spans of several hosts compare as well as their clocks
            agree.
        seconds: duration by a monotonic clock.
    """

    name: str
    began: float
    seconds: float

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle it quickly, which dataclasses do not: each answer in an update has some."""
        return Span, (self.name, self.began, self.seconds)


def seconds_of(spans: Iterable[Span], name: str) -> float:
    """Return the seconds of all `spans` of one name."""
    return sum(span.seconds for span in spans if span.name == name)


class PhaseClock:
    """Times the phases of one piece of work. `spans` has them in order, and each is logged.

    The wall clock is read once, at construction. All later times add a monotonic clock to it, so that
    differences between them are exact.

    Attributes:
        began: seconds since 1970.
    """

    def __init__(self) -> None:
        self.began, self._started = time.time(), time.perf_counter()
        self.spans: list[Span] = []

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each finished phase, added up where it ran more than once."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        return seconds

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body's duration as phase `name`, also if it raises."""
        started = self.total()
        try:
            yield
        finally:
            self.spans.append(Span(name, self.began + started, self.total() - started))
            logger.debug("%s: %.3f s", name, self.spans[-1].seconds)

    def total(self) -> float:
        """Return the seconds since the clock was made."""
        return time.perf_counter() - self._started

    def now(self) -> float:
        """Return seconds since 1970, by the wall clock as it was at construction."""
        return self.began + self.total()


_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def left_s() -> float:
    """Return the seconds until the deadline of this task, infinite without one."""
    return _deadline.get() - time.monotonic()


@contextlib.contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """Give tasks that the body creates a deadline in `timeout_s` seconds, in place of this task's."""
    token = _deadline.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _deadline.reset(token)
