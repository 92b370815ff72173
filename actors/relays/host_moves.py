"""Calls the holders of a host for the driver, from a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.actor import ActorHandle

from weightsync.actors.ray.control_channels import ControlChannel, ControlChannels
from weightsync.actors.ray.loop import LoopThread
from weightsync.actors.ray.remote import answer
from weightsync.channel.control import ControlOffer, HostMoved, HostTasks
from weightsync.channel.wire import SentError
from weightsync.errors import WeightSyncError
from weightsync.protocol.messages import Moved
from weightsync.protocol.peers import MOVE_LOOK_S

_TOGETHER_S = 0.05
"""How long after the first answer others may come, to go to the driver with it."""
_DIAL_S = 10.0
"""How long holders may take to dial. One that takes longer is called by the driver."""


class _Neighbour:
    """A holder of this host."""

    channel: ControlChannel | None = None

    def __init__(self, name: str, handle: ActorHandle[Any]) -> None:
        self.name, self.key = name, handle

    def answers(self, method: str) -> bool:
        return True

    async def answer_calls(self, offer: ControlOffer) -> None:
        await answer(self.name, self.key.answer_relay.remote(offer))


class HostMoves:
    """The moves of a host's holders, over control channels on the loopback.

    One thread calls the methods. A separate loop receives the answers.
    """

    def __init__(self, holders: Mapping[int, ActorHandle[Any]]) -> None:
        """Wait until `holders`, by index, have dialled."""
        self._loop = LoopThread()
        self._channels = ControlChannels(None, "127.0.0.1")
        self._holders = {index: _Neighbour(f"holder {index}", each) for index, each in holders.items()}
        self._moving: dict[int, asyncio.Future[Moved]] = {}
        self._uncalled: list[int] = []
        self._loop.run_concurrently(self._open()).result()

    def move_all(self, attempt: int, tasks: HostTasks, timeout_s: float) -> HostMoved:
        """Call `move` of all holders that `tasks` names, and return as `moved`."""
        return self._loop.run_concurrently(self._move_all(attempt, tasks, timeout_s)).result()

    def moved(self) -> HostMoved:
        """Return new outcomes and errors, and holders that could not be called.

        Waits for a first result, and shortly for more, but at most about `MOVE_LOOK_S` seconds.
        """
        return self._loop.run_concurrently(self._moved()).result()

    def close(self) -> None:
        """Hang up."""
        self._loop.run_concurrently(self._channels.close()).result()
        self._loop.close()

    async def _open(self) -> None:
        for each in self._holders.values():
            self._channels.open(each)
        deadline = asyncio.get_running_loop().time() + _DIAL_S
        while asyncio.get_running_loop().time() < deadline:
            if all(each.channel and each.channel.is_open for each in self._holders.values()):
                return
            await asyncio.sleep(0.01)

    async def _move_all(self, attempt: int, tasks: HostTasks, timeout_s: float) -> HostMoved:
        self._moving.clear()  # the driver stopped waiting for an earlier attempt
        for feeding, task, indices in tasks:
            for index in indices:
                channel = self._holders[index].channel
                call = channel.call("move", (attempt, feeding, task, timeout_s)) if channel else None
                if call is None:
                    self._uncalled.append(index)
                else:
                    self._moving[index] = moving = asyncio.ensure_future(call)
                    moving.add_done_callback(_heard)
        return await self._moved()

    async def _moved(self) -> HostMoved:
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


def _heard(moving: asyncio.Future[Moved]) -> None:
    """Note the error of a call, which nobody asks for if the driver has given it up."""
    if not moving.cancelled():
        moving.exception()
