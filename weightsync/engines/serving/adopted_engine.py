"""Base class of engines that somebody else started. WeightSync only pauses, loads and resumes them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from weightsync.engines.serving.engine_ranks import WEIGHTS, EngineRanks
from weightsync.errors import DeadlineError
from weightsync.plan import Plan
from weightsync.protocol.messages import Attached, FeedTicket

T = TypeVar("T")

_GO_ON_S = 5.0


class AdoptedEngine(EngineRanks):
    """An engine whose coroutines run on the event loop of somebody else's process, `_loop`."""

    _loop: asyncio.AbstractEventLoop
    _serving = 0
    _is_halted = False
    """True from a pause, or `hold`, until `resume`."""

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """Connect all ranks to their holders, and read the engine's name from the tickets."""
        self._name = tickets[0].engine
        return super().attach(plan, tickets, timeout_s)

    async def hold(self) -> None:
        """Have requests wait for the first version. Called on the event loop of the engine."""
        await self._pause("keep")
        self._is_halted = True

    def pause(self, mode: str, timeout_s: float) -> None:
        """Stop making tokens, and drop caches, so that frozen requests are recomputed.

        An engine that was paused before, and may have a mix of weights, stays paused if this raises.
        """
        serving, self._serving = self._serving, 0
        try:
            self._wait(self._pause(mode), timeout_s)
        except FutureTimeoutError as error:
            if not self._is_halted:
                self._wait(self._go_on(), _GO_ON_S)
                self._serving = serving
            raise DeadlineError(f"pause ({mode})", (f"engine {self._name}",), timeout_s) from error
        self._is_halted = True
        self._wake(WEIGHTS)
        self._settle()

    def serving(self) -> int:
        """Return the version being served, 0 while paused."""
        return self._serving

    def close(self) -> None:
        """Disconnect from the holders. The engine itself continues."""
        self.on_ranks("close")

    def _settle(self) -> None:
        """Wait for a step that ranks may still run with the old weights."""
        self.on_ranks("settle")

    @abstractmethod
    async def _pause(self, mode: str) -> None:
        """Pause as `pause`."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Let requests run again."""

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(timeout_s)
        except FutureTimeoutError:
            asked.cancel()
            raise
