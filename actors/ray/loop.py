"""An event loop on a thread, for callers that block."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from weightsync.errors import StateError

logger = logging.getLogger("weightsync.actors")

T = TypeVar("T")


class Submitted(Future[T]):
    """Work of a LoopThread. A coroutine may await it: if the wait is cancelled, the work continues.

    Attributes:
        caller: the thread whose call waits for it; None once a user has the future.
    """

    caller: int | None = None

    def __await__(self) -> Generator[Any, None, T]:
        """Wait on the running event loop for the result, or raise the error."""
        return asyncio.wrap_future(self).__await__()


class LoopThread:
    """Runs coroutines until `close`."""

    def __init__(self, owner: LoopThread | None = None) -> None:
        """Share the loop of `owner`, if given, without ending it."""
        self._owner = owner
        self._last: Submitted[Any] = Submitted()
        self._last.set_result(None)
        self._closed = False
        self._lock: threading.Lock = owner._lock if owner else threading.Lock()
        self._loop: asyncio.AbstractEventLoop = owner._loop if owner else asyncio.new_event_loop()
        if owner:
            return
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Return True if it takes no more work."""
        return self._closed

    def submit(
        self, work: Callable[[], Coroutine[object, object, T]], also: Sequence[LoopThread] = ()
    ) -> Submitted[T]:
        """Run `work`, one submission at a time, also as a submission to `also`.

        The returned future cannot be cancelled once `work` runs. If an earlier call of this thread was
        interrupted, as by Ctrl-C, wait for the end of that call's work first.

        Raises StateError while other work runs, and after `close`.
        """
        for each in (self, *also):
            each.end_interrupted()
        with self._lock:
            for each in (self, *also):
                if each._closed:
                    raise StateError("this WeightSync is closed: make a new one")
                if not each._last.done():
                    raise StateError("an update is running: wait for it to end")
            future: Submitted[T] = Submitted()
            future.set_running_or_notify_cancel()
            future.caller = threading.get_ident()
            for each in (self, *also):
                each._last = future

        async def run() -> None:
            try:
                future.set_result(await work())
            except BaseException as error:  # noqa: BLE001 (the waiting thread raises it)
                future.set_exception(error)

        self.run_concurrently(run())
        return future

    def end_interrupted(self) -> None:
        """Wait for work whose call in this thread was interrupted. The work has its own deadlines."""
        if self._last.caller != threading.get_ident() or self._last.done():
            return
        logger.warning("[driver] waiting for the end of a call that was interrupted")
        wait([self._last])
        logger.warning(
            "[driver] that call ended: %s", self._last.exception() or "it did all that it was to do"
        )

    def run_concurrently(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run `work` concurrently with submitted work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self, work: Callable[[], Coroutine[object, object, object]]) -> None:
        """Run `work` concurrently with all other work, without waiting for it. Does nothing after `shut`."""
        if not self._closed:
            self.run_concurrently(work())

    def shut(self) -> bool:
        """Refuse further submissions. Returns whether it was open."""
        was_open, self._closed = not self._closed, True
        return was_open

    def close(self) -> None:
        """Cancel all running work and end the thread, unless it is another's."""
        if self._owner:
            return
        self.run_concurrently(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
