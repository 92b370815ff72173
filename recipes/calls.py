"""Waiting for several actors at once, and naming the one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from weightsync.actors.remote import answer
from weightsync.driver.gather import Outcome, gather_named

__all__ = ["collect", "gather"]


def collect(calls: Mapping[str, Awaitable[Any]], phase: str, timeout_s: float) -> dict[str, Any]:
    """The answers to `calls`, by the names of who was called.

    Raises:
        WeightSyncError: what an actor raised, if it is ours; PeerLostError, PeerError or, after
            `timeout_s` seconds, DeadlineError otherwise; all name who failed.
    """

    return gather(calls, phase, timeout_s).require()


def gather(calls: Mapping[str, Awaitable[Any]], phase: str, timeout_s: float) -> Outcome[Any]:
    """As `collect`, but what each of `calls` failed with is kept beside the answers of the others."""

    async def wait() -> Outcome[Any]:
        answers = {name: answer(name, reference) for name, reference in calls.items()}
        return await gather_named(answers, phase, timeout_s)

    return asyncio.run(wait())
