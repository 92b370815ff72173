"""Runs calls that may never return on daemon threads, which do not block exit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from weightsync.errors import DeadlineError

__all__ = ["on_daemon"]

T = TypeVar("T")


async def on_daemon(
    call: Callable[[], T],
    who: str,
    phase: str,
    timeout_s: float,
    when_late: Callable[[T], None] = lambda _: None,
) -> T:
    """Run `call` on a daemon thread and wait at most `timeout_s` seconds.

    `asyncio.to_thread` does not fit: the interpreter joins its threads at exit, and calls that hang use them
    up. If the deadline passes or the wait is cancelled, the thread continues, and `when_late` gets what
    `call` returns in the end.

    Raises what `call` raises, or DeadlineError, which names `who` and `phase`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (the waiting coroutine raises it)
            if result.set_running_or_notify_cancel():
                result.set_exception(error)
        else:
            if result.set_running_or_notify_cancel():
                result.set_result(value)
            else:
                when_late(value)

    Thread(target=run, name=f"weightsync {phase} {who}", daemon=True).start()
    waiting, in_time = asyncio.wrap_future(result), False
    try:
        in_time = bool((await asyncio.wait([waiting], timeout=timeout_s))[0])
    finally:
        # The cancel fails if `call` has just returned. Its result is still unclaimed then.
        if not in_time and not result.cancel() and result.exception() is None:
            when_late(result.result())
    if not in_time:
        raise DeadlineError(phase, (who,), timeout_s)
    return waiting.result()
