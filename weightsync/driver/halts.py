"""Calls that stop engines from serving, also after their caller has given them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from weightsync.driver.engine_state import EngineRecord
from weightsync.errors import WeightSyncError

__all__ = ["Halts"]

_Late = Callable[[WeightSyncError | None], None]


class Halts:
    """At most one unanswered pause or sleep of each engine.

    A call that was given up may still arrive: an engine's process that was stopped takes it once it goes on.
    Therefore the next call waits for the answer to the last one, so that they never overlap in the engine.
    """

    def __init__(self) -> None:
        self._unanswered: dict[str, tuple[EngineRecord, asyncio.Task[None]]] = {}

    def unanswered(self, name: str, record: EngineRecord) -> bool:
        """Whether a call to this engine was made, and not answered yet."""
        return self._task(name, record) is not None

    async def ask(
        self,
        name: str,
        record: EngineRecord,
        call: Callable[[], Coroutine[object, object, None]],
        late: _Late,
    ) -> None:
        """Await `call`, and what was asked of this engine before. Raises as `call`.

        When the wait is cancelled, `call` goes on, and `late` is told how it ended.
        """
        if before := self._task(name, record):
            await asyncio.wait([before])
        task = asyncio.ensure_future(call())
        self._unanswered[name] = record, task
        task.add_done_callback(lambda _: self._forget(name, task))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: _tell(task, late))
            raise

    def _task(self, name: str, record: EngineRecord) -> asyncio.Task[None] | None:
        known, task = self._unanswered.get(name, (None, None))
        return task if known is record else None  # else another actor has that name now

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._unanswered[name][1] is task:
            del self._unanswered[name]


def _tell(task: asyncio.Task[None], late: _Late) -> None:
    if task.cancelled():
        return  # the driver ends
    error = task.exception()
    if error is None or isinstance(error, WeightSyncError):
        late(error)
    else:
        raise error  # a bug: the loop logs it
