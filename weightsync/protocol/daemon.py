"""Runs calls that may never return on daemon threads, which do not block the process's exit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def on_daemon(call: Callable[[], T], name: str = "weightsync-daemon") -> Future[T]:
    """Run `call` in a new daemon thread called `name`, so that it may hang for ever.

    The future cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)

    Thread(target=run, daemon=True, name=name).start()
    return future
