"""Who may work on the fleet when: updates alone, refills and newcomers beside each other, between updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

__all__ = ["UpdateLock"]

Stop = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """Work that is over in no time needs no end."""


class UpdateLock:
    """An update waits for nobody: who works beside is told to stop, and left behind if it does not."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long an update waits for those that it stops."""
        self._patience_s = patience_s
        self._idle = asyncio.Event()
        self._idle.set()
        self._shared: dict[str, tuple[Stop, asyncio.Event]] = {}

    @asynccontextmanager
    async def shared(self, name: str, stop: Stop = _nothing) -> AsyncIterator[None]:
        """Work on engine `name` while no update runs; `stop` has to end it soon."""
        while not self._idle.is_set() or name in self._shared:
            if not self._idle.is_set():
                await self._idle.wait()
            else:
                await self._shared[name][1].wait()
        ended = asyncio.Event()
        self._shared[name] = (stop, ended)
        try:
            yield
        finally:
            del self._shared[name]
            ended.set()

    async def idle(self) -> None:
        """Until no update runs."""
        await self._idle.wait()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[list[str]]:
        """Stop the others, and keep them out; yields the names of those that have not stopped."""
        self._idle.clear()
        try:
            others = dict(self._shared)
            for stop, _ in others.values():
                await stop()
            waits = {name: asyncio.ensure_future(ended.wait()) for name, (_, ended) in others.items()}
            if waits:
                await asyncio.wait(waits.values(), timeout=self._patience_s)
            for wait in waits.values():
                wait.cancel()
            yield [name for name in others if name in self._shared]
        finally:
            self._idle.set()
