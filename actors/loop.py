"""An event loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from weightsync.errors import StateError

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """Runs coroutines until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[object, object, T]]) -> Future[T]:
        """Run `work`, alone among what is submitted; its future cannot be cancelled half-way.

        Raises StateError while earlier work runs, and after `close`.
        """
        with self._lock:
            if self._closed:
                raise StateError("this WeightSync is closed: make a new one")
            if not self._last.done():
                raise StateError("an update is running: wait for it to end")
            future: Future[T] = Future()
            future.set_running_or_notify_cancel()
            self._last = future

        async def run() -> None:
            try:
                future.set_result(await work())
            except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
                future.set_exception(error)

        self.beside(run())
        return future

    def beside(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run `work` beside what is submitted."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def shut(self) -> bool:
        """Let nothing be submitted any more. Whether it was open."""
        was_open, self._closed = not self._closed, True
        return was_open

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        self.beside(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
