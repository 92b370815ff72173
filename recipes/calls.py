"""Waiting for several actors at once, and naming the one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from actors.remote import answer
from weightsync.deadline import gather_named

__all__ = ["collect"]


def collect(calls: Mapping[str, Awaitable[Any]], phase: str, timeout_s: float) -> dict[str, Any]:
    """The answers to `calls`, by the names of who was called.

    Raises:
        WeightSyncError: what an actor raised, if it is ours; PeerLostError, PeerError or, after
            `timeout_s` seconds, DeadlineError otherwise; all name who failed.
    """

    async def wait() -> dict[str, Any]:
        outcome = await gather_named(
            {name: answer(name, reference) for name, reference in calls.items()}, phase, timeout_s
        )
        return outcome.require()

    return asyncio.run(wait())
