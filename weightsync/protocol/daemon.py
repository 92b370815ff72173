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
    Thread(target=_run, args=(future, [call]), daemon=True, name=name).start()
    return future


def _run(future: Future[T], calls: list[Callable[[], T]]) -> None:
    """Run the call in `calls`, and drop it before the future knows.

    The process may exit at once then. A C++ object that ends meanwhile on a daemon thread, such as the `Work`
    of a process group, would end the process with ``terminate called``: it cannot take the GIL back.
    """
    try:
        result = calls.pop()()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)
