"""The update lock: an update runs without other work.

Between updates, work on single engines runs in parallel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Stop = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """Work that is over in no time needs no end."""


class UpdateLock:
    """Readers-writer lock in which updates pre-empt work on single engines.

    Work that does not stop in time is left behind.
    """

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long an update waits for the work that it stops, in seconds."""
        self._patience_s = patience_s
        self._turn, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()
        self._shared: dict[str, tuple[Stop, asyncio.Event]] = {}

    @asynccontextmanager
    async def shared(self, name: str, stop: Stop = _nothing) -> AsyncIterator[None]:
        """Hold engine `name` while no update runs. `stop` must end the body soon."""
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

    @property
    def is_wanted(self) -> bool:
        """Return True if an update runs, or waits until work on single engines stops."""
        return not self._idle.is_set()

    def is_held(self, name: str) -> bool:
        """Return True while work on engine `name` runs, also if the work did not stop for an update."""
        return name in self._shared

    async def idle(self) -> None:
        """Wait until no update runs."""
        await self._idle.wait()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[list[str]]:
        """Stop work on single engines, and keep out all other work. Yields the engines whose work runs on."""
        async with self._turn:
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
