"""Awaits calls that may never return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from weightsync.errors import DeadlineError
from weightsync.protocol.daemon import on_daemon

T = TypeVar("T")


async def await_daemon(
    call: Callable[[], T],
    name: str,
    phase: str,
    timeout_s: float,
    when_late: Callable[[T], None] = lambda _: None,
) -> T:
    """Run `call` on a daemon thread and wait at most `timeout_s` seconds.

    `asyncio.to_thread` does not fit: the interpreter joins such threads at exit, and calls that hang use them
    up. If the deadline passes or the wait is cancelled, the thread continues, and `when_late` gets the result
    of `call` in the end.

    Raises the error of `call`, or DeadlineError, which names `name` and `phase`.
    """
    result = on_daemon(call, f"weightsync {phase} {name}")
    waiting, in_time = asyncio.wrap_future(result), False

    def late(ended: Future[T]) -> None:
        if ended.exception() is None:
            when_late(ended.result())

    try:
        in_time = bool((await asyncio.wait([waiting], timeout=timeout_s))[0])
    finally:
        if not in_time:
            waiting.cancel()  # the loop may have ended when the call does
            result.add_done_callback(late)
    if not in_time:
        raise DeadlineError(phase, (name,), timeout_s)
    return waiting.result()
