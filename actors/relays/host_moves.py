"""Calls the holders of a host for the driver, from a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from ray.actor import ActorHandle

from weightsync.actors.ray.remote import answer
from weightsync.actors.relays.move_relay import HostMoved, HostTasks
from weightsync.channel.wire import SentError
from weightsync.driver.gather import gather_named
from weightsync.errors import WeightSyncError
from weightsync.node.link import Link, Links
from weightsync.protocol.messages import Moved, UpdateTask
from weightsync.protocol.peers import MOVE_LOOK_S

_TOGETHER_S = 0.05
"""How long after the first answer others may come, to go to the driver with it."""
_DIAL_S = 10.0
"""How long holders may take to dial. One that takes longer is called by the driver."""
_GONE_S = 0.2
"""A neighbour that has hung up has ended, unless it dials again in this time."""


class Moving(Protocol):
    """A holder that the first holder of its host calls."""

    async def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved: ...


class HostMoves:
    """The moves of a host's holders, which dial this holder on the loopback. See `HostMoving`.

    Used on the loop of this holder's node.
    """

    def __init__(self, holders: Mapping[int, ActorHandle[Any]]) -> None:
        """`holders`: the actors, by index."""
        self._actors = holders
        self._links: dict[int, Link] = {}
        self._moving: dict[int, asyncio.Future[Moved]] = {}
        self._uncalled: list[int] = []

    async def move_all(self, attempt: int, tasks: HostTasks, timeout_s: float) -> HostMoved:
        """Call `move` of all holders that `tasks` names, and return as `moved`."""
        if not self._links:
            await self._open()
        self._moving.clear()  # the driver stopped waiting for an earlier attempt
        for task, indices in tasks:
            for index in indices:
                if self._links[index].is_dialled:
                    move = self._links[index].call("move", attempt, task, timeout_s)
                    self._moving[index] = moving = asyncio.ensure_future(move)
                    moving.add_done_callback(_heard)
                else:
                    self._uncalled.append(index)
        return await self.moved()

    async def _open(self) -> None:
        """Have the holders dial."""
        listening = Links("127.0.0.1")
        self._closing = asyncio.create_task(_close_at_end(listening))
        self._links = {index: Link(f"holder {index}", Moving, _GONE_S) for index in self._actors}
        calls = {
            link.name: answer(link.name, self._actors[i].answer_relay.remote(listening.offer(link)))
            for i, link in self._links.items()
        }
        await gather_named(calls, "dial", _DIAL_S)

    async def moved(self) -> HostMoved:
        """Return new outcomes and errors, and holders that could not be called.

        Waits for a first result, and shortly for more, but at most about `MOVE_LOOK_S` seconds.
        """
        uncalled, self._uncalled = tuple(self._uncalled), []
        if self._moving and not uncalled:
            await self._wait()
        ended = {index: self._moving.pop(index) for index, each in [*self._moving.items()] if each.done()}
        moved: dict[int, Moved] = {}
        errors: dict[int, SentError] = {}
        for index, each in ended.items():
            try:
                moved[index] = each.result()
            except WeightSyncError as error:
                errors[index] = SentError.of(error)
        return moved, errors, uncalled

    async def _wait(self) -> None:
        first = asyncio.FIRST_COMPLETED
        ended, left = await asyncio.wait(self._moving.values(), timeout=MOVE_LOOK_S, return_when=first)
        if ended and left and not any(each.exception() for each in ended):
            await asyncio.wait(left, timeout=_TOGETHER_S, return_when=asyncio.FIRST_EXCEPTION)


async def _close_at_end(listening: Links) -> None:
    """Hang up on the neighbours when this loop ends, with the node of this holder."""
    try:
        await asyncio.Event().wait()
    finally:
        await listening.close()


def _heard(moving: asyncio.Future[Moved]) -> None:
    """Note the error of a call, which nobody asks for if the driver has given it up."""
    if not moving.cancelled():
        moving.exception()
