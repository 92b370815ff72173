"""Calls that may never return, on threads that no interpreter waits for at its exit."""

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
    """Run `call` on a thread of its own, for at most `timeout_s` seconds.

    `asyncio.to_thread` would not do: the interpreter joins the threads of its executor when it exits, and
    calls that hang fill that executor. Where the wait ends first, by its deadline or by cancelling, the
    thread goes on, and `when_late` takes what `call` returns in the end.

    Raises what `call` raises; DeadlineError, which names `who` and `phase`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (the one that waits raises it)
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
        # It cannot be cancelled if it has just returned: nobody has taken what it returned then.
        if not in_time and not result.cancel() and result.exception() is None:
            when_late(result.result())
    if not in_time:
        raise DeadlineError(phase, (who,), timeout_s)
    return waiting.result()
