"""Calls that may never return."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.patience import patient
from weightsync.actors.ray.daemon import await_daemon
from weightsync.errors import DeadlineError


def test_it_returns_what_the_call_does_and_raises_what_it_raises() -> None:
    def fail() -> None:
        raise KeyError("no host is free")

    assert asyncio.run(await_daemon(lambda: 7, "name", "phase", 60)) == 7
    with pytest.raises(KeyError, match="no host is free"):
        asyncio.run(await_daemon(fail, "name", "phase", 60))


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_what_comes_late_is_handed_over_and_nobody_waits_for_the_thread(how: str) -> None:
    go_on, late, done = threading.Event(), [], threading.Event()

    def call() -> int:
        assert threading.current_thread().daemon
        assert go_on.wait(patient(60))
        return 7

    def when_late(value: int) -> None:
        late.append(value)
        done.set()

    async def work() -> None:
        waiting = asyncio.ensure_future(
            await_daemon(call, "name", "phase", 0.05 if how == "deadline" else 60, when_late)
        )
        if how == "cancelled":
            await asyncio.sleep(0)
            waiting.cancel()
        error = DeadlineError if how == "deadline" else asyncio.CancelledError
        with pytest.raises(error):
            await waiting

    asyncio.run(work())
    assert not late
    go_on.set()
    assert done.wait(patient(60))
    assert late == [7]


def test_what_came_just_as_the_wait_was_cancelled_is_late_too() -> None:
    late: list[int] = []
    returned = threading.Event()

    async def work() -> None:
        def call() -> int:
            returned.set()
            return 7

        waiting = asyncio.ensure_future(await_daemon(call, "name", "phase", 60, late.append))
        await asyncio.sleep(0)
        assert returned.wait(patient(60))  # the loop has not heard of it yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(work())
    assert late == [7]
