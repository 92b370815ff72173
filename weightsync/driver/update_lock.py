"""Who may work on the fleet when: updates alone, refills and newcomers beside each other, between updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

__all__ = ["Turns"]

Stop = Callable[[], Awaitable[None]]


class Turns:
    """An update waits for nobody: who works beside is told to stop, and left behind if it does not."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long an update waits for those that it stops."""
        self._patience_s = patience_s
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._beside: dict[str, tuple[Stop, asyncio.Event]] = {}

    @asynccontextmanager
    async def beside(self, name: str, stop: Stop) -> AsyncIterator[None]:
        """Work on engine `name` while no update runs; `stop` has to end it soon."""
        while not self._quiet.is_set() or name in self._beside:
            if not self._quiet.is_set():
                await self._quiet.wait()
            else:
                await self._beside[name][1].wait()
        ended = asyncio.Event()
        self._beside[name] = (stop, ended)
        try:
            yield
        finally:
            del self._beside[name]
            ended.set()

    async def quiet(self) -> None:
        """Until no update runs."""
        await self._quiet.wait()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[list[str]]:
        """Stop the others, and keep them out; yields the names of those that have not stopped."""
        self._quiet.clear()
        try:
            others = dict(self._beside)
            for stop, _ in others.values():
                await stop()
            waits = {name: asyncio.ensure_future(ended.wait()) for name, (_, ended) in others.items()}
            if waits:
                await asyncio.wait(waits.values(), timeout=self._patience_s)
            for wait in waits.values():
                wait.cancel()
            yield [name for name in others if name in self._beside]
        finally:
            self._quiet.set()
