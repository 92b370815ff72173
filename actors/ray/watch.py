"""Notices processes that end or stop answering between updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import ray

from weightsync.actors.ray.remote import RemoteEngine, RemoteHolder
from weightsync.driver.gather import gather_named
from weightsync.errors import DeadlineError, PeerError, RestartedError, StateError, WeightSyncError

Lost = Callable[[WeightSyncError], None]
Heard = Callable[[], None]


class Watches:
    """Keeps a call waiting in each process, which Ray fails when it ends. Also pings engines."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def engine(self, engine: RemoteEngine, lost: Lost, heard: Heard) -> None:
        """Call `heard` at each heartbeat of `engine`, and `lost` at the first that it misses or when it ends.

        One that missed heartbeats may be heard again, and lost again. So may the next process of an actor.
        """
        self._begin(engine, lambda: self._engine(engine, lost, heard))

    def holder(self, holder: RemoteHolder, lost: Lost) -> None:
        """Call `lost` once when `holder` ends."""
        self._begin(holder, lambda: self._ended(holder.watch(), lost))

    async def close(self) -> None:
        """End all watches, and wait until they have ended."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(
        self, peer: RemoteEngine | RemoteHolder, work: Callable[[], Coroutine[object, object, None]]
    ) -> None:
        """Start a watch of `peer`, in place of a watch under another name."""
        if known := self._tasks.get(peer.key):
            if known.get_name() == peer.name:
                return
            known.cancel()
        self._tasks[peer.key] = task = asyncio.create_task(work(), name=peer.name)
        task.add_done_callback(lambda _: self._forget(peer.key, task))

    def _forget(self, key: Hashable, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _engine(self, engine: RemoteEngine, lost: Lost, heard: Heard) -> None:
        waiting, before = asyncio.ensure_future(engine.watch()), None
        try:
            while not await self._has_ended(waiting):
                if not ray.is_initialized():
                    return  # a call would start a new Ray
                if waiting.done():
                    waiting = asyncio.ensure_future(engine.watch())
                ping = {engine.name: engine.ping()}
                error = (await gather_named(ping, "heartbeat", self._heartbeat_s)).failures.get(engine.name)
                if await self._has_ended(waiting, 0):
                    break
                is_new = isinstance(error, RestartedError)
                if error is None or (is_new and isinstance(before, RestartedError)):
                    heard()
                elif before is None or is_new:
                    lost(error)
                if error and not is_new and not is_silence(error):
                    return
                before = error
            await self._ended(waiting, lost)
        finally:
            waiting.cancel()

    async def _has_ended(self, waiting: asyncio.Future[None], timeout_s: float | None = None) -> bool:
        """Wait for a heartbeat's time, or until the process has ended. Returns whether it has."""
        timeout_s = self._heartbeat_s if timeout_s is None else timeout_s
        if (await asyncio.wait([waiting], timeout=timeout_s))[0] and not waiting.cancelled():
            # Ray lost the connection, or the actor's next process does not have the adapter yet.
            if isinstance(waiting.exception(), PeerError | StateError):
                await asyncio.sleep(timeout_s)
                return False
            return True
        return False

    @staticmethod
    async def _ended(waiting: Any, lost: Lost) -> None:  # noqa: ANN401 (an awaitable)
        try:
            await waiting
        except WeightSyncError as error:
            if ray.is_initialized():  # else the driver itself is ending
                lost(error)


def is_silence(error: WeightSyncError) -> bool:
    """Return True if the process may still be there."""
    return isinstance(error, (DeadlineError, PeerError))
