"""Has holders move, through relays or directly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeAlias

from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S
from weightsync.errors import DeadlineError, WeightSyncError
from weightsync.protocol.messages import Moved, UpdateTask
from weightsync.protocol.peers import MoveRelayPeer

logger = logging.getLogger("weightsync.driver")

_SILENT_S = GRACE_S / 2
"""A relay is silent after that time, well before the holders behind it are."""


_Said: TypeAlias = Mapping[int, Moved | WeightSyncError | None]


class Moves:
    """The moves of one attempt. Each ends as if the driver had called the holder itself.

    Where a relay fails, the driver calls those holders of which it does not know the end. They may move
    already: a holder moves once for an attempt, and answers both.

    Attributes:
        calls: by the holders' names.
    """

    def __init__(self, fleet: Fleet, attempt: int, tasks: Mapping[int, UpdateTask], timeout_s: float) -> None:
        """`tasks`: by the holder's index."""
        self._fleet, self._attempt, self._tasks, self._timeout_s = fleet, attempt, tasks, timeout_s
        self._relayed: dict[int, asyncio.Future[Moved]] = {}
        self._work: list[asyncio.Task[None]] = []
        for relay in fleet.move_relays:
            if len(its := [index for index in relay.holders if index in tasks]) > 1:
                loop = asyncio.get_running_loop()
                self._relayed |= {index: loop.create_future() for index in its}
                self._work.append(asyncio.create_task(self._through(relay, its)))
        relayed = self._relayed
        self.calls: Mapping[str, Awaitable[Moved]] = {
            f"holder {index}": relayed[index] if index in relayed else self._call(index) for index in tasks
        }

    def close(self) -> None:
        """Stop waiting for holders. The attempt is over."""
        for each in self._work:
            each.cancel()

    def _call(self, index: int) -> Awaitable[Moved]:
        return self._fleet.holders[index].move(self._attempt, self._tasks[index], self._timeout_s)

    async def _through(self, relay: MoveRelayPeer, indices: Sequence[int]) -> None:
        left = set(indices)
        begin = relay.move(self._attempt, {index: self._tasks[index] for index in indices}, self._timeout_s)
        said = await self._ask(relay, begin)
        while said is not None:
            left -= said.keys()
            for index, each in said.items():
                self._end(index, each)
            self._begin_directly(index for index, each in said.items() if each is None)
            if not left:
                return
            said = await self._ask(relay, relay.moved())
        self._begin_directly(left)

    async def _ask(self, relay: MoveRelayPeer, call: Coroutine[object, object, _Said]) -> _Said | None:
        asking = asyncio.create_task(call)
        try:
            if (await asyncio.wait([asking], timeout=_SILENT_S))[0]:
                return asking.result()
            error: WeightSyncError = DeadlineError("move", (relay.name,), _SILENT_S)
        except WeightSyncError as raised:
            error = raised
        finally:
            asking.cancel()
        logger.warning("[driver] calls holders itself: %s", error)
        relay.renew()
        return None

    def _begin_directly(self, indices: Iterable[int]) -> None:
        self._work += [asyncio.create_task(self._directly(index)) for index in indices]

    async def _directly(self, index: int) -> None:
        try:
            self._end(index, await self._call(index))
        except WeightSyncError as error:
            self._end(index, error)

    def _end(self, index: int, said: Moved | WeightSyncError | None) -> None:
        moving = self._relayed[index]
        if said is None or moving.done():
            return  # it is called directly, or the attempt is over
        if isinstance(said, WeightSyncError):
            moving.set_exception(said)
        else:
            moving.set_result(said)
