"""Notices processes that end or stop answering between updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from weightsync.actors.remote import RemoteEngine, RemoteHolder
from weightsync.driver.gather import gather_named
from weightsync.errors import WeightSyncError

Lost = Callable[[WeightSyncError], None]


class Watches:
    """Keeps a call waiting in each process, which Ray fails when it ends.

    Also pings engines.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._tasks: dict[Any, asyncio.Task[None]] = {}

    def engine(self, engine: RemoteEngine, lost: Lost) -> None:
        """Call `lost` once when `engine` ends, or misses a heartbeat."""
        self._begin(engine.handle, lambda: self._engine(engine, lost))

    def holder(self, holder: RemoteHolder, lost: Lost) -> None:
        """Call `lost` once when `holder` ends."""
        self._begin(holder.handle, lambda: self._ended(holder.watch(), lost))

    def _begin(self, handle: Any, work: Callable[[], Coroutine[object, object, None]]) -> None:  # noqa: ANN401
        if handle in self._tasks:
            return
        task = asyncio.create_task(work())
        self._tasks[handle] = task
        task.add_done_callback(lambda _: self._tasks.pop(handle))

    async def _engine(self, engine: RemoteEngine, lost: Lost) -> None:
        waiting = asyncio.ensure_future(engine.watch())
        try:
            while not (await asyncio.wait([waiting], timeout=self._heartbeat_s))[0]:
                if not ray.is_initialized():
                    return  # a call would start a new Ray
                ping = {engine.name: engine.ping()}
                heard = await gather_named(ping, "heartbeat", self._heartbeat_s)
                if heard.failures and not waiting.done():
                    lost(heard.failures[engine.name])
                    return
            await self._ended(waiting, lost)
        finally:
            waiting.cancel()

    @staticmethod
    async def _ended(waiting: Any, lost: Lost) -> None:  # noqa: ANN401 (an awaitable)
        try:
            await waiting
        except WeightSyncError as error:
            if ray.is_initialized():  # else the driver itself is ending
                lost(error)
