"""Holders' processes that start before their ranks are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync.actors.holders.weight_holder import HolderStandby, spawn_standby
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.process import ask_pid
from weightsync.actors.ray.remote import RemoteHolder, answer, remote_holder
from weightsync.config import SyncConfig
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerLostError, WeightSyncError

AsksPlacements: TypeAlias = Callable[[], Awaitable[Sequence[Placement]]]
"""Asks an actor for the placements of its ranks. The actor may have no placements yet."""


@dataclass(frozen=True, slots=True)
class _Standby:
    """A process.

    Attributes:
        device: the process's GPU, as `HolderStandby.bound_to` returns it after the start; None if the process
            ended.
        pid: the process id, as of `ask_pid`.
        key: the key of the placement that the process was started for; None for any placement on the node.
    """

    node: str
    handle: ActorHandle[HolderStandby]
    device: asyncio.Task[str | None]
    pid: ObjectRef[int]
    key: tuple[str, str] | None = None

    @classmethod
    def start(cls, node: str, gpu: int | str | None, key: tuple[str, str] | None = None) -> _Standby:
        """Start it. `gpu` as of `HolderStandby`."""
        handle = spawn_standby(node, gpu)
        return cls(node, handle, asyncio.ensure_future(_bound_to(handle)), ask_pid(handle), key)

    @property
    def has_ended(self) -> bool:
        return self.device.done() and self.device.result() is None


async def _bound_to(handle: ActorHandle[HolderStandby]) -> str | None:
    try:
        device: str = await answer("spare holder", handle.bound_to.remote())
    except WeightSyncError:
        return None
    return device


class Standbys:
    """Processes that become holders in `bind`, or end. Used on one event loop. They end with their driver."""

    def __init__(self, held: Collection[tuple[str, str]]) -> None:
        """`held`: the keys of placements that have a holder now. The caller changes it."""
        self._held = held
        self._standbys: list[_Standby] = []
        self._asking: dict[ActorHandle[Any], asyncio.Task[None]] = {}
        self._placements: dict[ActorHandle[Any], Sequence[Placement]] = {}

    def start(self, node: str, num_gpus: int, num_engines: int) -> None:
        """Start one process for each GPU of a host, or for each engine without GPUs."""
        gpus: Sequence[int | None] = range(num_gpus) or [None] * num_engines
        there = sum(each.node == node for each in self._standbys)
        self._standbys += [_Standby.start(node, gpu) for gpu in gpus[there:]]

    def follow(
        self,
        trainers: Mapping[ActorHandle[Any], AsksPlacements],
        engines: Mapping[ActorHandle[Any], AsksPlacements],
    ) -> None:
        """Start a process at the placements of these actors, as soon as an actor knows them.

        Replaces the actors of an earlier call: processes for other actors end. An actor that fails is left
        out, since `connect` asks again and raises.
        """
        actors = {**trainers, **engines}
        for handle in [*self._asking]:
            if handle not in actors:
                self._asking.pop(handle).cancel()
                self._placements.pop(handle, None)
        wanted = {placement.key for its in self._placements.values() for placement in its}
        self._end([each for each in self._standbys if each.key and each.key not in wanted])
        for handle, ask in actors.items():
            if handle not in self._asking:
                self._asking[handle] = asyncio.ensure_future(self._start_for(handle, ask, handle in engines))

    async def _start_for(self, handle: ActorHandle[Any], ask: AsksPlacements, is_engine: bool) -> None:
        try:
            placements = await ask()
        except WeightSyncError:
            placements = ()
        self._placements[handle] = placements
        for placement in placements:
            self._start_at(placement)
        if is_engine:
            self._expect(placements)
        if self._placements.keys() >= self._asking.keys():
            # No engine is left that measures free memory on a trainer's GPU while it starts.
            self._expect([placement for its in self._placements.values() for placement in its])

    def _start_at(self, placement: Placement) -> None:
        known = {each.key for its in self._placements.values() for each in its} - {*self._held}
        there = sum(each.node == placement.node for each in self._standbys)
        if placement.key in known and there < sum(node == placement.node for node, _ in known):
            self._standbys.append(_Standby.start(placement.node, placement.gpu or None, placement.key))

    def _expect(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            for each in self._standbys:
                if each.node == placement.node:
                    each.handle.expect.remote(placement.device)

    def has_one_for(self, placement: Placement) -> bool:
        """Return True if one was started for just this placement."""
        return any(each.key == placement.key for each in self._standbys)

    async def bind(
        self, placements: Mapping[str, Placement], transport: str, config: SyncConfig
    ) -> dict[str, tuple[RemoteHolder, ObjectRef[int]]]:
        """Turn processes into the holders of `placements`, by name. Returns holders and process ids.

        All other processes end, and `follow` is over.

        A placement is left out if no process fits, or if the process has ended. A process that was started
        for any placement is not used if it does not answer in ``config.timeout_s``. Other processes may still
        start, or hang: calls to their holders wait.
        """
        self._stop_following()
        taken = await self._match(placements, transport, config.timeout_s)
        self._end([each for each in self._standbys if each not in taken.values()])
        becoming = {
            name: asyncio.ensure_future(
                answer(name, each.handle.sit.remote(name, placements[name], transport, config))
            )
            for name, each in taken.items()
        }
        quick = {name: asyncio.shield(each) for name, each in becoming.items() if taken[name].device.done()}
        failures = (await gather_named(quick, "start", config.timeout_s)).failures
        self._end([taken.pop(name) for name, e in failures.items() if isinstance(e, PeerLostError)])
        self._standbys.clear()
        return {
            name: (remote_holder(name, each.handle, becoming[name]), each.pid) for name, each in taken.items()
        }

    async def _match(
        self, placements: Mapping[str, Placement], transport: str, timeout_s: float
    ) -> dict[str, _Standby]:
        """Choose a process for each placement: started for the placement, for the GPU, or for the host."""
        free = {f"spare {i}": each for i, each in enumerate(self._standbys) if not each.has_ended}
        calls = {name: asyncio.shield(each.device) for name, each in free.items() if each.key is None}
        answers = (await gather_named(calls, "start", timeout_s)).answers
        devices = {name: device for name, device in answers.items() if device is not None}
        devices |= {name: each.key[1] for name, each in free.items() if each.key}
        taken: dict[str, _Standby] = {}
        for is_own in (True, False):
            for name, placement in placements.items():
                wanted = placement.device if transport == "nccl" else ""
                fits = (
                    other
                    for other, device in devices.items()
                    if (each := free[other]).node == placement.node
                    and (each.key == placement.key if is_own else device in (wanted, "") or not wanted)
                )
                if name not in taken and (found := next(fits, None)):
                    taken[name] = free[found]
                    del devices[found]
        return taken

    def close(self) -> None:
        """End all."""
        self._stop_following()
        self._end([*self._standbys])

    def _stop_following(self) -> None:
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()
        self._placements.clear()

    def _end(self, standbys: Sequence[_Standby]) -> None:
        for each in standbys:
            self._standbys.remove(each)
            ray.kill(each.handle)
