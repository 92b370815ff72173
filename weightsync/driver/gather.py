"""Waits for several named peers at once, with one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightsync.errors import DeadlineError, PeerLostError, TransportError, WeightSyncError
from weightsync.protocol.timing import within

GRACE_S = 2.0
"""Seconds from a peer's own deadline to the driver's deadline. The peer's error names the late process."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The answers and failures of named calls. Every name is in exactly one of them."""

    answers: dict[str, T]
    failures: dict[str, WeightSyncError]

    @classmethod
    def of(cls, tasks: Mapping[str, asyncio.Future[T]], late: Callable[[str], WeightSyncError]) -> Outcome[T]:
        """Collect the outcome of `tasks`. `late` makes the error of one that has not ended, or was cancelled.

        Errors other than WeightSyncError are bugs and propagate.
        """
        outcome: Outcome[T] = cls({}, {})
        for name, task in tasks.items():
            if not task.done() or task.cancelled():
                outcome.failures[name] = late(name)
            elif isinstance(error := task.exception(), WeightSyncError):
                outcome.failures[name] = error
            else:
                outcome.answers[name] = task.result()
        return outcome

    def require(self) -> dict[str, T]:
        """Return all answers, or raise the failure nearest to the cause, see `remoteness`.

        One DeadlineError names all late peers, except peers that answered and only missed other peers.
        """
        late = {name: error for name, error in self.failures.items() if isinstance(error, DeadlineError)}
        silent = {name for name, error in late.items() if name in error.missing}
        missed = {name for error in late.values() for name in error.missing}
        names = sorted(missed - (self.failures.keys() - silent) - self.answers.keys())
        other = [error for name, error in self.failures.items() if name not in late]
        nearest = min(other, key=remoteness, default=None)
        if nearest and not (names and isinstance(nearest, TransportError)):
            raise nearest
        if late:
            first = next(iter(late.values()))
            # If peers only missed each other, the first error says which one it missed.
            raise DeadlineError(first.phase, names, first.timeout_s) if names else first
        return self.answers


def remoteness(error: WeightSyncError) -> int:
    """Sort key, root causes first: lost peers, then a peer's own errors, then transport errors."""
    return 0 if isinstance(error, PeerLostError) else 2 if isinstance(error, TransportError) else 1


async def gather_named(
    calls: Mapping[str, Awaitable[T]], phase: str, timeout_s: float, *, together: bool = False
) -> Outcome[T]:
    """Await all of `calls` for at most `timeout_s` seconds.

    A WeightSyncError is recorded as a failure, as is a DeadlineError for each call without an answer. Any
    other exception is a bug and propagates. With `together`, for calls that need each other, a lost peer ends
    the wait: each call without an answer fails with a TransportError.
    """
    if not calls:
        return Outcome({}, {})
    with within(timeout_s):
        tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    pending, deadline, lost = set(tasks.values()), time.monotonic() + timeout_s, None
    when = asyncio.FIRST_EXCEPTION if together else asyncio.ALL_COMPLETED
    try:
        while pending and not lost and (left_s := deadline - time.monotonic()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=when)
            errors = (task.exception() for task in done if together)
            lost = next((error for error in errors if isinstance(error, PeerLostError)), None)
    except asyncio.CancelledError:
        for each in tasks.values():
            each.cancel()
        # Collect their exceptions, so that asyncio does not log them as never retrieved.
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        raise
    for left in pending:
        left.cancel()

    def late(name: str) -> WeightSyncError:
        given_up = TransportError(f"{phase} of {name} is given up: {lost}") if lost else None
        return given_up or DeadlineError(phase, (name,), timeout_s)

    return Outcome.of(tasks, late)
