"""The holders' processes: which runs on which seat, started where one is missing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from weightsync.actors.daemon import on_daemon
from weightsync.actors.detached import actor_name, end, find, names, run_prefix
from weightsync.actors.process import PATIENCE_S, end_pid
from weightsync.actors.remote import RemoteHolder, answer
from weightsync.actors.seat import Seat
from weightsync.actors.weight_holder import Spare, spawn_holder, spawn_spare
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import ConfigError, DeadlineError

__all__ = ["Holders"]


_DEVICES = ("slot:", "cuda:")


class Holders:
    """At most one holder for each seat."""

    def __init__(self, config: SyncConfig, run: str | None) -> None:
        """`run`: under which name they outlive their driver; if there is none, they end with it."""
        self._config, self._run = config, run
        self._on: dict[tuple[str, str], RemoteHolder] = {}
        self._pids: dict[Any, Any] = {}
        self._transport = ""
        self._spares: list[tuple[str, ActorHandle[Spare]]] = []

    def spare(self, node: str, num_gpus: int, num_engines: int) -> None:
        """Start processes before it is known on which seats of that host: `settle` uses or ends them."""
        here = sum(each == node for each, _ in self._spares)
        if not self._on and not self._run:
            gpus: Sequence[int | None] = range(num_gpus) or [None] * num_engines
            self._spares += [(node, spawn_spare(node, gpu)) for gpu in gpus[here:]]

    def expect(self, seat: Seat) -> None:
        """Before `settle`: an engine rank sits there, and others are still to come."""
        for node, spare in self._spares:
            if node == seat.node:
                spare.expect.remote(seat.device)

    async def settle(self, seats: Sequence[Seat]) -> list[RemoteHolder]:
        """One that answers for each of `seats`, in order, and none elsewhere."""
        transport = self._choose_transport(seats)
        if transport != self._transport:
            await self._change(transport)
        # Who has lost its engine may have its memory mapped, which the next one on that GPU needs.
        for key in self._on.keys() - {seat.key for seat in seats}:
            self._end(key)
        running = {f"holder on {seat.device}": seat for seat in seats if seat.key in self._on}
        pings = {name: self._on[seat.key].ready() for name, seat in running.items()}
        for name, error in (await gather_named(pings, "ping", self._config.timeout_s)).failures.items():
            if isinstance(error, DeadlineError):
                await self._end_hung(running[name].key)
            else:
                self._end(running[name].key)
        await self._seat_spares(seats)
        return [self._start(seat, index) for index, seat in enumerate(seats)]

    async def _seat_spares(self, seats: Sequence[Seat]) -> None:
        """Who does not answer is left out: its seat gets a process of its own."""
        spares = {f"spare {i}": each for i, each in enumerate(self._spares)}
        calls = {name: answer(name, spare.bound_to.remote()) for name, (_, spare) in spares.items()}
        bound = (await gather_named(calls, "start", self._config.timeout_s)).answers
        free: defaultdict[tuple[str, str], list[tuple[str, ActorHandle[Spare]]]] = defaultdict(list)
        for name, gpu in bound.items():
            node, _ = spares[name]
            free[node, gpu if self._transport == "nccl" else ""].append(spares[name])
        calls, taken = {}, {}
        for index, seat in enumerate(seats):
            fits = free[seat.key] or free[seat.node, ""]
            if fits and seat.key not in self._on:
                here = fits.pop()
                self._spares.remove(here)
                name, spare = f"holder {index}", here[1]
                calls[name] = answer(name, spare.sit.remote(name, seat, self._transport))
                taken[name] = seat, spare
        outcome = await gather_named(calls, "start", self._config.timeout_s)
        for name, (seat, spare) in taken.items():
            if name in outcome.answers:
                self._keep(seat, name, spare)
            else:
                ray.kill(spare)
        self._end_spares()

    def _end_spares(self) -> None:
        while self._spares:
            ray.kill(self._spares.pop()[1])

    def take(self, seat: Seat, left: Seat | None, index: int) -> RemoteHolder:
        """The one for a rank that came later: of its seat, of the seat that it `left`, or number `index`.

        In host memory, a process that sat alone leaves its holder to the one that takes its place.
        """
        alone = left is not None and left.device.startswith("slot:pid-") and left.node == seat.node
        if alone and left and seat.key not in self._on and left.key in self._on:
            self._on[seat.key] = self._on.pop(left.key)
        return self._start(seat, index)

    def lost(self, holder: RemoteHolder) -> None:
        """It ended: the next rank on its seat gets another."""
        for key in [key for key, known in self._on.items() if known is holder]:
            self._end(key)

    def close(self) -> None:
        """End them all."""
        self._end_spares()
        for key in [*self._on]:
            self._end(key)
        for name in self._left():  # by a driver that died, where this one did not come to connecting
            end(name)

    async def _change(self, transport: str) -> None:
        """Those of another transport end; those of this one that an earlier driver left are taken over."""
        for key in [*self._on]:
            self._end(key)
        self._transport = transport
        left = {name: RemoteHolder(name, handle) for name in self._left() if (handle := find(name))}
        pings = {name: holder.ready() for name, holder in left.items()}
        answers = (await gather_named(pings, "ping", self._config.timeout_s)).answers
        for name, holder in left.items():
            called, of = answers.get(name, ("", ""))
            if of == transport:
                self._on[_key(name, self._prefix)] = RemoteHolder(called, holder.handle)
                self._pids[holder.handle] = holder.handle.__ray_call__.remote(_pid)
            else:
                end(name)

    def _left(self) -> list[str]:
        """Names of the run's holders; its other actors are not called by a device."""
        found = names(self._prefix) if self._run and ray.is_initialized() else []
        return [name for name in found if _key(name, self._prefix)[1].startswith(_DEVICES)]

    @property
    def _prefix(self) -> str:
        return run_prefix(self._run)

    def _start(self, seat: Seat, index: int) -> RemoteHolder:
        if seat.key not in self._on:
            name = _unused(index, {holder.name for holder in self._on.values()})
            outlives_as = actor_name(self._run, *seat.key) if self._run else ""
            self._keep(seat, name, spawn_holder(name, seat, self._transport, outlives_as))
        return self._on[seat.key]

    def _keep(self, seat: Seat, name: str, handle: ActorHandle[Any]) -> None:
        self._on[seat.key] = RemoteHolder(name, handle)
        self._pids[handle] = handle.__ray_call__.remote(_pid)

    async def _end_hung(self, key: tuple[str, str]) -> None:
        """Ray's own kill does not end a process that is stopped."""
        asked = self._pids.get(self._on[key].handle)
        self._end(key)
        if asked and ray.wait([asked], timeout=0)[0]:
            try:
                pid = ray.get(asked)
            except RayError:
                return  # it never ran
            await on_daemon(lambda: end_pid(key[0], pid), f"holder on {key[1]}", "end", 2 * PATIENCE_S)

    def _end(self, key: tuple[str, str]) -> None:
        handle = self._on.pop(key).handle
        self._pids.pop(handle, None)
        ray.kill(handle)
        if self._run:
            end(actor_name(self._run, *key))  # the next may be called the same

    def _choose_transport(self, seats: Sequence[Seat]) -> str:
        slots = [seat.device for seat in seats if not seat.gpu]
        if self._config.transport == "nccl" and slots:
            raise ConfigError("sync.transport", "nccl", f"{slots[0]} has no GPU: give auto")
        if self._config.transport != "auto":
            return self._config.transport
        return "gloo" if slots else "nccl"


def _unused(index: int, names: Collection[str]) -> str:
    """`index` may be the number under which one that moved up in the order was started."""
    return next(name for number in count(index) if (name := f"holder {number}") not in names)


def _pid(_: object) -> int:
    return os.getpid()


def _key(name: str, prefix: str) -> tuple[str, str]:
    """Node and device, as the name says them."""
    node, _, device = name.removeprefix(prefix).partition("/")
    return node, device
