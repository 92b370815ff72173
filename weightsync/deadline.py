"""Waiting for several named peers at once, with one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from weightsync.errors import DeadlineError, WeightSyncError

__all__ = ["GRACE_S", "Outcome", "gather_named"]

GRACE_S = 2.0
"""Peers keep a deadline themselves and say what was late; ours, later by this, is for the silent."""

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """Who answered what: every name is in exactly one of the two."""

    answers: dict[str, T]
    failures: dict[str, WeightSyncError]

    def require(self) -> dict[str, T]:
        """All answers. Raises the first failure; late peers are named in one DeadlineError."""
        late = [error for error in self.failures.values() if isinstance(error, DeadlineError)]
        other = [error for error in self.failures.values() if not isinstance(error, DeadlineError)]
        if other:
            raise other[0]
        if late:
            names = sorted({name for error in late for name in error.missing})
            raise DeadlineError(late[0].phase, names, late[0].timeout_s)
        return self.answers


async def gather_named(
    calls: Mapping[str, Coroutine[object, object, T]], phase: str, timeout_s: float
) -> Outcome[T]:
    """Await all of `calls` for at most `timeout_s` seconds.

    A WeightSyncError is an outcome; a name without an answer becomes a DeadlineError of its own.
    Anything else that is raised is a bug and propagates.
    """
    if not calls:
        return Outcome({}, {})
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    try:
        _, pending = await asyncio.wait(tasks.values(), timeout=timeout_s)
    except asyncio.CancelledError:
        for task in tasks.values():
            task.cancel()
        # What they raised, nobody is going to ask.
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        raise
    for task in pending:
        task.cancel()
    answers: dict[str, T] = {}
    failures: dict[str, WeightSyncError] = {}
    for name, task in tasks.items():
        if task in pending:
            failures[name] = DeadlineError(phase, (name,), timeout_s)
        elif isinstance(error := task.exception(), WeightSyncError):
            failures[name] = error
        else:
            answers[name] = task.result()
    return Outcome(answers, failures)
