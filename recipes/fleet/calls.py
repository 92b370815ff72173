"""Waits for calls to several actors and names the actor that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from weightsync.actors.ray.remote import answer
from weightsync.driver.gather import Outcome, gather_named


def collect(calls: Mapping[str, Awaitable[Any]], phase: str, timeout_s: float) -> dict[str, Any]:
    """Wait for all `calls` and return their answers by actor name.

    Raises:
        WeightSyncError: the actor's own WeightSyncError, else PeerLostError, PeerError or, after
            `timeout_s` seconds, DeadlineError; each names the actor.
    """

    return gather(calls, phase, timeout_s).require()


def gather(calls: Mapping[str, Awaitable[Any]], phase: str, timeout_s: float) -> Outcome[Any]:
    """Wait for all `calls` like `collect`, but return failures alongside answers instead of raising."""

    async def wait() -> Outcome[Any]:
        answers = {name: answer(name, reference) for name, reference in calls.items()}
        return await gather_named(answers, phase, timeout_s)

    return asyncio.run(wait())
