"""Direct reads of engines that were adopted, which are planned once they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineFailed, Events
from weightsync.driver.fleet import Fleet
from weightsync.driver.update_lock import UpdateLock
from weightsync.errors import ConfigError, StateError

logger = logging.getLogger("weightsync.driver")


class LateReads:
    """Plans adopted engines' reads from trainers, between updates: no refill needs them.

    An update waits for reads that are being planned, and plans the remaining reads itself. If an engine's
    reads cannot be planned, the engine takes broadcasts. If the plan has no buckets for broadcasts, the next
    update connects the fleet again.
    """

    def __init__(
        self,
        fleet: Fleet,
        events: Events,
        engine_group: EngineGroup,
        update_lock: UpdateLock,
        connected: Callable[[], Connection],
    ) -> None:
        self._fleet, self._events, self._connected = fleet, events, connected
        self._engine_group, self._update_lock = engine_group, update_lock
        self._tasks = set[asyncio.Task[None]]()

    def begin(self, name: str) -> None:
        """Start to plan the reads of engine `name`, which was adopted."""
        task = asyncio.create_task(self._plan_between_updates(name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, connection: Connection) -> bool:
        """Plan the reads of all engines that take part in an update. Must hold the exclusive lock.

        Returns True if the plan covers the needs of all engines.
        """
        await asyncio.gather(*(self._plan(connection, name) for name in self._fleet.live()))
        return connection.router.suffices

    async def _plan_between_updates(self, name: str) -> None:
        async with self._update_lock.shared(name):
            if not (member := self._fleet.engines.get(name)):
                return  # it was removed
            await self._plan(self._connected(), name)
        if member.attached or self._fleet.engines.get(name) is not member:
            return
        if member.record.state is EngineState.SERVING:  # an update went on without it
            self._engine_group.enter([name], EngineState.STALE)
            error = StateError("its holders took too long to prepare its direct reads")
            self._events.publish(EngineFailed(name, error))

    async def _plan(self, connection: Connection, name: str) -> None:
        router = connection.router
        if not self._fleet.engines[name].attached or not router.joining(name):
            return
        try:
            await router.plan_reads(name)
        except ConfigError as error:  # it would be refused again
            self._engine_group.lost(name, error)
            return
        if not (router.suffices or router.reads_directly(name)):
            cause = router.routes[name]
            logger.warning("[engine %s] the next update connects the fleet again: %s", name, cause)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Log a bug at once. The next update meets it again."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("[engine %s] its reads are not planned: %r", task.get_name(), error)
