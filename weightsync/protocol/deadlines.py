"""The deadline of what a task waits for. A call that travels carries it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def left_s() -> float:
    """Return the seconds until the deadline of this task, infinite without one."""
    return _deadline.get() - time.monotonic()


@contextmanager
def within(timeout_s: float) -> Iterator[None]:
    """Give tasks that the body creates a deadline in `timeout_s` seconds, in place of this task's."""
    token = _deadline.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _deadline.reset(token)
