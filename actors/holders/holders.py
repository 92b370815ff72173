"""Starts, binds and ends the holders' processes, one for each GPU or slot."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from weightsync.actors.holders.detached import end, find, names, run_prefix
from weightsync.actors.holders.holder_processes import (
    HolderProcesses,
    OwnProcesses,
    SharedProcesses,
    Starts,
)
from weightsync.actors.holders.standbys import AsksPlacements, Standbys
from weightsync.actors.ray.daemon import await_daemon
from weightsync.actors.ray.placement import Placement, choose_transport
from weightsync.actors.ray.process import PATIENCE_S, ask_pid, end_pid
from weightsync.actors.ray.remote import RemoteHolder, remote_holder
from weightsync.actors.servers.handle import ProcessHandle
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import ConfigError, DeadlineError
from weightsync.plan import Plan

_DEVICES = ("slot:", "cuda:")


class Holders:
    """The holders that run, at most one for each placement."""

    def __init__(
        self,
        config: SyncConfig,
        run: str | None,
        shared: SharedProcesses | None,
        starts: Starts,
    ) -> None:
        """
        Args:
            run: the name under which holders outlive the driver. Without a name they end with the driver.
            shared: processes shared with other fleets' holders. Without them, each holder has a process.
            starts: starts holders beside processes that joined.
        """
        self._config, self._run, self._shared = config, run, shared
        self._on: dict[tuple[str, str], RemoteHolder] = {}
        self._own, self._starts = OwnProcesses(run), starts
        self._transport, self._apart, self._broadcasts = "", False, False
        self._standbys = Standbys(self._on.keys())
        self._beginning, self._begun = asyncio.Lock(), set[tuple[str, str]]()

    async def begin(self, placement: Placement, trainer: int) -> None:
        """Start the holder of a trainer rank while engines still start, which takes them longer.

        `place` ends it if it turns out to be none that it wants.
        """
        async with self._beginning:
            with suppress(ConfigError):  # `place` raises it
                transport = choose_transport(self._config.transport, [placement.device])
                if not self._transport:
                    await self._change(transport, self._must_be_apart(transport, [placement]))
                has_one = placement.key in self._on or self._standbys.has_one_for(placement)
                if transport == self._transport and not has_one:
                    if not self._processes.runs(placement, transport):
                        self._begun.add(placement.key)
                    self._start(placement, trainer)

    def standby(self, node: str, num_gpus: int, num_engines: int) -> None:
        """Start processes on that host ahead of time. `place` binds them to a GPU or slot, or ends them."""
        if not self._on and not self._run:
            self._standbys.start(node, num_gpus, num_engines)

    def follow(
        self,
        trainers: Mapping[ActorHandle[Any], AsksPlacements],
        engines: Mapping[ActorHandle[Any], AsksPlacements],
    ) -> None:
        """Start processes ahead of time, only for these actors, as `Standbys.follow` does.

        Does nothing for holders that outlive their driver, since earlier holders would have to be taken over.
        """
        if not self._run and not self._shared:
            self._standbys.follow(trainers, engines)

    async def place(self, placements: Sequence[Placement]) -> list[RemoteHolder]:
        """Return a holder that answers for each placement, in order. Ends all other holders."""
        transport = choose_transport(self._config.transport, [each.device for each in placements])
        apart = self._must_be_apart(transport, placements)
        if (transport, apart) != (self._transport, self._apart):
            await self._change(transport, apart)
        # A holder that lost an engine may still map the engine's memory, which the next engine on that GPU
        # needs.
        for key in self._on.keys() - {placement.key for placement in placements}:
            self._end(key)
        for index, placement in enumerate(placements):
            if self._processes.runs(placement, transport):
                self._start(placement, index)  # and see whether that process answers
        running = {
            f"holder on {placement.device}": placement
            for placement in placements
            if placement.key in self._on and placement.key not in self._begun
        }
        self._begun.clear()  # connecting waits for these
        pings = {name: self._on[placement.key].ready() for name, placement in running.items()}
        for name, error in (await gather_named(pings, "ping", self._config.timeout_s)).failures.items():
            if running[name].key not in self._on:
                continue  # `lost` was faster
            if isinstance(error, DeadlineError):
                await self._kill_hung(running[name].key)
            else:
                self._kill(running[name].key)
        await self._bind_standbys(placements)
        return [self._start(placement, index) for index, placement in enumerate(placements)]

    async def _bind_standbys(self, placements: Sequence[Placement]) -> None:
        missing: dict[str, Placement] = {}
        for index, placement in enumerate(placements):
            if placement.key not in self._on:
                missing[_unused(index, self._names() | missing.keys())] = placement
        bound = await self._standbys.bind(missing, self._transport, self._config)
        for name, (holder, pid) in bound.items():
            self._on[missing[name].key] = self._own.keep(holder, pid)

    def place_late(self, placement: Placement, left: Placement | None, index: int) -> RemoteHolder:
        """Return the holder for a late rank: existing, left by the rank's predecessor, or new.

        Without a GPU, a process that is alone in a slot leaves its holder to the replacement.
        """
        alone = left is not None and left.device.startswith("slot:pid-") and left.node == placement.node
        if alone and left and placement.key not in self._on and left.key in self._on:
            self._on[placement.key] = self._on.pop(left.key)
            self._processes.move(self._on[placement.key], placement)
        return self._start(placement, index)

    def lost(self, holder: RemoteHolder) -> None:
        """Forget a holder that ended. The next rank placed there gets another."""
        for key in [key for key, known in self._on.items() if known is holder]:
            self._kill(key)

    def split(self, plan: Plan) -> bool:
        """Return True if holders have to leave shared processes for `plan`.

        Then `place` has to follow.

        Kernels of NCCL wait for peers on the GPU. Kernels of several communicators in one process may wait
        for one another.
        """
        was_apart, self._broadcasts = self._apart, plan.slots > 0 and plan.members.num_holders > 1
        return self._must_be_apart(self._transport, ()) and not was_apart

    def _must_be_apart(self, transport: str, placements: Collection[Placement]) -> bool:
        """Return True if holders at `placements` move bytes by NCCL, as far as that is known."""
        hosts = {placement.node for placement in placements}
        broadcasts = self._broadcasts or self._config.mode == "broadcast"
        return self._shared is not None and transport == "nccl" and (broadcasts or len(hosts) > 1)

    @property
    def _processes(self) -> HolderProcesses:
        return self._own if self._shared is None or self._apart else self._shared

    def _processes_of(self, holder: RemoteHolder) -> HolderProcesses:
        return self._own if isinstance(holder.handle, ProcessHandle) else self._processes

    def close(self) -> None:
        """End all holders, also those that an earlier driver of this run left."""
        self._standbys.close()
        for key in [*self._on]:
            self._end(key)
        for name in self._left():  # a driver died, and this one never connected
            end(name)

    async def ended(self) -> None:
        """Wait until holders that ended have freed their memory."""
        await self._processes.ended()

    async def _change(self, transport: str, apart: bool) -> None:
        """Switch to `transport`: end other holders, take over an earlier driver's holders.

        Holders that listen on other ports than this driver's, or with other files of TLS, are ended, too.
        """
        for key in [*self._on]:
            self._end(key)
        self._transport, self._apart = transport, apart
        left = {name: remote_holder(name, handle) for name in self._left() if (handle := find(name))}
        pings = {name: holder.ready() for name, holder in left.items()}
        answers = (await gather_named(pings, "ping", self._config.timeout_s)).answers
        for name, holder in left.items():
            called, *settings = answers.get(name, ("", "", None, None))
            if settings == [transport, self._config.ports, self._config.tls_files]:
                found = self._own.keep(remote_holder(called, holder.handle), ask_pid(holder.handle))
                self._on[_key(name, self._prefix)] = found
            else:
                end(name)

    def _left(self) -> list[str]:
        """Names of the run's holders. Only their names contain a device."""
        found = names(self._prefix) if self._run and ray.is_initialized() else []
        return [name for name in found if _key(name, self._prefix)[1].startswith(_DEVICES)]

    @property
    def _prefix(self) -> str:
        return run_prefix(self._run)

    def _start(self, placement: Placement, index: int) -> RemoteHolder:
        if placement.key not in self._on:
            name = _unused(index, self._names())
            where = name, placement, self._transport, self._config
            joined = self._starts(*where)
            self._on[placement.key] = remote_holder(name, joined) if joined else self._processes.start(*where)
        return self._on[placement.key]

    def _names(self) -> set[str]:
        return {holder.name for holder in self._on.values()}

    async def _kill_hung(self, key: tuple[str, str]) -> None:
        """End a holder that does not answer. Ray's own kill does not end a stopped process."""
        asked = self._processes.pid(self._on[key])
        self._kill(key)
        if asked and ray.wait([asked], timeout=0)[0]:
            try:
                pid = ray.get(asked)
            except RayError:
                return  # it never ran
            await await_daemon(lambda: end_pid(key[0], pid), f"holder on {key[1]}", "end", 2 * PATIENCE_S)

    def _end(self, key: tuple[str, str]) -> None:
        holder = self._on.pop(key)
        self._processes_of(holder).end(holder, key)

    def _kill(self, key: tuple[str, str]) -> None:
        holder = self._on.pop(key)
        self._processes_of(holder).kill(holder, key)


def _unused(index: int, names: Collection[str]) -> str:
    """An unused name. A holder started as `index` may have another index now."""
    return next(name for number in count(index) if (name := f"holder {number}") not in names)


def _key(name: str, prefix: str) -> tuple[str, str]:
    """The node and device in a holder's actor name."""
    node, _, device = name.removeprefix(prefix).partition("/")
    return node, device
