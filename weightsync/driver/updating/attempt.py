"""One attempt to move a version: holders move and engines load, each with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence

from weightsync.driver.gather import GRACE_S, Outcome
from weightsync.errors import DeadlineError, PeerLostError, RankLostError
from weightsync.protocol.messages import LoadReport, Moved
from weightsync.protocol.timing import within

_FINAL = (PeerLostError, RankLostError, DeadlineError)
"""Errors of an engine that no holder has to explain; other errors may repeat a holder's error."""


class Attempt:
    """The calls of one attempt, run in parallel.

    An engine's time runs while holders wait for the engine, and after the holders' moves end. It does not run
    while holders wait for other engines. A holder has a deadline for each wait, and is silent if it misses
    the deadline.
    """

    def __init__(
        self,
        moves: Mapping[str, Awaitable[Moved]],
        loads: Mapping[str, Coroutine[object, object, LoadReport]],
        feeds: Mapping[str, Sequence[str]],
        timeout_s: float,
    ) -> None:
        """Start all calls. `loads` is by engine; `feeds` names each engine's holders in `moves`."""
        self._timeout_s, self._begun = timeout_s, time.monotonic()
        # Engines may use up their time one after another; the holders come on top.
        self._limit_s = (len(loads) + 1) * timeout_s + GRACE_S
        with within(self._limit_s):
            self._moves = {name: asyncio.ensure_future(call) for name, call in moves.items()}
            first_error = asyncio.wait(self._moves.values(), return_when=asyncio.FIRST_EXCEPTION)
            self._broken = asyncio.create_task(first_error)  # ends as well once all moves have
            self._loads = {
                name: asyncio.create_task(self._load(name, call, [self._moves[each] for each in feeds[name]]))
                for name, call in loads.items()
            }

    async def run(self) -> tuple[Outcome[Moved], Outcome[LoadReport]]:
        """Wait for every move and every load. Errors other than WeightSyncError are bugs and propagate."""
        try:
            await self._wait()
        finally:
            for task in (*self._moves.values(), *self._loads.values()):
                task.cancel()
        took_s = round(time.monotonic() - self._begun, 3)
        return (
            Outcome.of(self._moves, lambda name: DeadlineError("move", (name,), took_s)),
            Outcome.of(self._loads, lambda name: DeadlineError("move", (f"engine {name}",), took_s)),
        )

    async def lost_holder(self) -> PeerLostError | None:
        """Wait for a lost holder. Returns the error, or None if all moves ended otherwise."""
        await asyncio.wait([self._broken])
        while True:
            ended = [move for move in self._moves.values() if move.done() and not move.cancelled()]
            lost = [error for move in ended if isinstance(error := move.exception(), PeerLostError)]
            left = [move for move in self._moves.values() if not move.done()]
            if lost or not left:
                return next(iter(lost), None)
            await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)

    async def _wait(self) -> None:
        moves, loads = self._moves.values(), self._loads.values()
        loaded = asyncio.create_task(asyncio.wait(loads))
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait([self._broken, loaded], timeout=self._limit_s, return_when=first)
        finally:
            loaded.cancel()
        # Holders that still move wait for the one that failed, and end by their own deadline. If none failed,
        # every load has ended, so a holder that still moves has been left by the others.
        broke = any(task.done() and not task.cancelled() and task.exception() for task in moves)
        if left := [task for task in moves if not task.done()]:
            await asyncio.wait(left, timeout=GRACE_S + (self._timeout_s if broke else 0))
        for task in moves:
            task.cancel()
        if waiting := [task for task in loads if not task.done()]:
            await asyncio.wait(waiting, timeout=self._timeout_s + GRACE_S)

    async def _load(
        self, name: str, call: Coroutine[object, object, LoadReport], moves: Sequence[asyncio.Future[Moved]]
    ) -> LoadReport:
        load, moving = asyncio.create_task(call), asyncio.create_task(asyncio.wait(moves))
        try:
            await asyncio.wait([load, moving], return_when=asyncio.FIRST_COMPLETED)
            if load.done() and (not load.exception() or isinstance(load.exception(), _FINAL)):
                return load.result()
            await moving  # the holders' answers say whether they gave the engine up
            moved = [task.result() for task in moves if not (task.cancelled() or task.exception())]
            if slow := next((each.slow for each in moved if each.slow), None):
                raise slow
            waited_s = max((each.waited_s for each in moved), default=0.0)
            left_s = self._timeout_s - waited_s if len(moved) == len(moves) else GRACE_S
            if not (await asyncio.wait([load], timeout=left_s))[0]:
                raise DeadlineError("move", (f"engine {name}",), round(left_s, 3))
            return await load
        finally:
            load.cancel()
            moving.cancel()
