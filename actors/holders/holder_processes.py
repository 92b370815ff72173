"""The processes in which holders run: one for each holder, or one for all holders of a placement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync.actors.holders.detached import actor_name, end
from weightsync.actors.holders.holder_parts import spawn_parts
from weightsync.actors.holders.weight_holder import holder_settings, spawn_holder
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.process import ask_pid, kill
from weightsync.actors.ray.remote import RemoteHolder, answer, remote_holder, remote_part
from weightsync.actors.servers.handle import ProcessHandle
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerLostError

logger = logging.getLogger("weightsync.actors")

_CLOSE_S = 15.0
"""Time for a holder to end running work and free memory."""


Starts: TypeAlias = Callable[[str, Placement, str, SyncConfig], ProcessHandle | None]
"""Starts a holder beside a process that joined, as `HolderProcesses.start`. Returns None if Ray starts it."""


class HolderProcesses(Protocol):
    """Starts and ends holders. All methods run on one event loop."""

    def runs(self, placement: Placement, transport: str) -> bool:
        """Return whether a holder there would share a process that has started."""

    def start(self, name: str, placement: Placement, transport: str, config: SyncConfig) -> RemoteHolder:
        """Return a new holder."""

    def end(self, holder: RemoteHolder, placement: tuple[str, str]) -> None:
        """End a holder. `placement` is the key of the holder's placement."""

    def kill(self, holder: RemoteHolder, placement: tuple[str, str]) -> None:
        """End a holder's process, which has ended, hangs or cannot use its GPU any more."""

    def move(self, holder: RemoteHolder, placement: Placement) -> None:
        """Note that a holder, with the process, now serves another placement."""

    def pid(self, holder: RemoteHolder) -> ObjectRef[int] | None:
        """Return the holder's process id, as of `ask_pid`, or None.

        It is None if the process was ended for another holder, or if Ray did not start it.
        """

    async def ended(self) -> None:
        """Wait until holders that `end` was called with have freed their memory."""


class OwnProcesses:
    """Processes with one holder per process."""

    def __init__(self, run: str | None) -> None:
        """`run`: the name under which holders outlive their driver."""
        self._run = run
        self._pids: dict[RemoteHolder, ObjectRef[int]] = {}

    def runs(self, placement: Placement, transport: str) -> bool:
        return False

    def start(self, name: str, placement: Placement, transport: str, config: SyncConfig) -> RemoteHolder:
        outlives_as = actor_name(self._run, *placement.key) if self._run else ""
        handle = spawn_holder(name, placement, transport, config, outlives_as)
        return self.keep(remote_holder(name, handle), ask_pid(handle))

    def keep(self, holder: RemoteHolder, pid: ObjectRef[int]) -> RemoteHolder:
        """Have it end as those that were started here. Returns it."""
        self._pids[holder] = pid
        return holder

    def end(self, holder: RemoteHolder, placement: tuple[str, str]) -> None:
        self._pids.pop(holder, None)
        kill(holder.handle)
        if self._run:
            end(actor_name(self._run, *placement))  # the next holder there may need the name

    kill = end

    def move(self, holder: RemoteHolder, placement: Placement) -> None:
        """Do nothing: the process is found by the holder."""

    def pid(self, holder: RemoteHolder) -> ObjectRef[int] | None:
        return self._pids.get(holder)

    async def ended(self) -> None:
        """Do nothing: memory goes with the process."""


@dataclass(eq=False, slots=True)
class _Process:
    """A process with several holders. `first`: opens the first holder."""

    handle: ActorHandle[Any]
    pid: ObjectRef[int]
    holders: set[RemoteHolder] = field(default_factory=set)
    first: asyncio.Future[None] | None = None


class SharedProcesses:
    """One process per placement and transport, with one holder per fleet.

    A process ends with the last holder. If it ends earlier, all its holders end. The first fleet that needs a
    holder there again starts another process, and other fleets get holders in that process.
    """

    def __init__(self) -> None:
        self._on: dict[tuple[str, str, str], _Process] = {}
        self._of: dict[RemoteHolder, _Process] = {}
        self._numbers = count()
        self._closing: set[asyncio.Task[None]] = set()

    def runs(self, placement: Placement, transport: str) -> bool:
        process = self._on.get((*placement.key, transport))
        return process is not None and process.first is not None and process.first.done()

    def start(self, name: str, placement: Placement, transport: str, config: SyncConfig) -> RemoteHolder:
        key = (*placement.key, transport)
        if key not in self._on:
            handle = spawn_parts(placement, transport)
            self._on[key] = _Process(handle, ask_pid(handle))
        process, part = self._on[key], next(self._numbers)
        settings = holder_settings(name, placement, transport, config)
        opening = asyncio.ensure_future(answer(name, process.handle.open_part.remote(part, settings)))
        holder = remote_part(name, process.handle, part, opening)
        process.first = process.first or opening
        process.holders.add(holder)
        self._of[holder] = process
        return holder

    def end(self, holder: RemoteHolder, placement: tuple[str, str]) -> None:
        process = self._of.get(holder)
        if process and process.holders != {holder}:
            del self._of[holder]
            process.holders.remove(holder)
            task = asyncio.ensure_future(self._close(holder))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        else:
            self.kill(holder, placement)

    def kill(self, holder: RemoteHolder, placement: tuple[str, str]) -> None:
        if process := self._of.get(holder):  # else another fleet has ended it
            self._on = {key: each for key, each in self._on.items() if each is not process}
            for each in process.holders:
                del self._of[each]
            ray.kill(process.handle)

    @staticmethod
    async def _close(holder: RemoteHolder) -> None:
        closing = {holder.name: holder.close()}
        for error in (await gather_named(closing, "close", _CLOSE_S)).failures.values():
            if not isinstance(error, PeerLostError):
                logger.warning("[%s] its memory is not free yet: %s", holder.name, error)

    def move(self, holder: RemoteHolder, placement: Placement) -> None:
        process = self._of.get(holder)
        for key in [key for key, each in self._on.items() if each is process]:
            self._on.setdefault((*placement.key, key[2]), self._on.pop(key))

    def pid(self, holder: RemoteHolder) -> ObjectRef[int] | None:
        process = self._of.get(holder)
        return process.pid if process else None

    async def ended(self) -> None:
        if self._closing:
            await asyncio.wait([*self._closing])
