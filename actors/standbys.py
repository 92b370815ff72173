"""Holders' processes that start before it is known what they will hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from weightsync.actors.placement import Placement
from weightsync.actors.process import ask_pid, end_hung
from weightsync.actors.remote import answer
from weightsync.actors.weight_holder import HolderStandby, spawn_standby
from weightsync.config import Ports
from weightsync.driver.gather import gather_named
from weightsync.errors import DeadlineError, WeightSyncError

AsksPlacements: TypeAlias = Callable[[], Awaitable[Sequence[Placement]]]
"""Asks an actor for the placements of its ranks. It may have none yet."""


@dataclass(frozen=True, slots=True)
class _Standby:
    """A process.

    Attributes:
        key: of the placement that it was started for; None if for any on its node.
    """

    node: str
    handle: ActorHandle[HolderStandby]
    pid: ObjectRef[int]
    key: tuple[str, str] | None = None

    @classmethod
    def start(cls, node: str, gpu: int | str | None, key: tuple[str, str] | None = None) -> _Standby:
        """Start it. `gpu` as of `HolderStandby`."""
        handle = spawn_standby(node, gpu)
        return cls(node, handle, ask_pid(handle), key)


class Standbys:
    """Processes that become holders in `bind`, or end. Used on one event loop.

    They end with their driver.
    """

    def __init__(self, held: Collection[tuple[str, str]]) -> None:
        """`held`: the keys of placements that have a holder now. The caller changes it."""
        self._held = held
        self._standbys: list[_Standby] = []
        self._asking: dict[ActorHandle[Any], asyncio.Task[None]] = {}
        self._placements: dict[ActorHandle[Any], Sequence[Placement]] = {}

    def start(self, node: str, num_gpus: int, num_engines: int) -> None:
        """Start one for each GPU of a host, or for each engine if it has none."""
        gpus: Sequence[int | None] = range(num_gpus) or [None] * num_engines
        there = sum(each.node == node for each in self._standbys)
        self._standbys += [_Standby.start(node, gpu) for gpu in gpus[there:]]

    def follow(
        self,
        trainers: Mapping[ActorHandle[Any], AsksPlacements],
        engines: Mapping[ActorHandle[Any], AsksPlacements],
    ) -> None:
        """Start one wherever one of these actors says that it runs, as soon as it says so.

        Replaces the actors of an earlier call: what was started for others ends. An actor that fails is left
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
        """Whether one was started for just this placement."""
        return any(each.key == placement.key for each in self._standbys)

    async def bind(
        self,
        placements: Mapping[str, Placement],
        transport: str,
        ports: Ports | None,
        *,
        answer_s: float,
        start_s: float,
    ) -> dict[str, ActorHandle[Any]]:
        """Make them the holders of `placements`, by name. All others end, and `follow` is over.

        A placement is left out if none fits, or if its process ended. One that was started for any placement
        is not used if it does not answer in `answer_s` seconds.

        Raises DeadlineError with the names of holders whose processes do not start within `start_s` seconds.
        """
        self._stop_following()
        try:
            taken = await self._match(placements, transport, answer_s)
            calls = {
                name: answer(name, each.handle.sit.remote(name, placements[name], transport, ports))
                for name, each in taken.items()
            }
            outcome = await gather_named(calls, "start", start_s)
            late = sorted(name for name, e in outcome.failures.items() if isinstance(e, DeadlineError))
            for name in late:
                self._end([taken[name]])
                await end_hung(name, taken[name].node, taken[name].pid)
            if late:
                raise DeadlineError("start", late, start_s)
            bound = {name: taken[name] for name in outcome.answers}
            self._standbys = [each for each in self._standbys if each not in bound.values()]
            return {name: each.handle for name, each in bound.items()}
        finally:
            self._end([*self._standbys])

    async def _match(
        self, placements: Mapping[str, Placement], transport: str, answer_s: float
    ) -> dict[str, _Standby]:
        """Choose one for each placement, if there is one: its own, else one of its GPU, or of its host."""
        free = dict(zip((f"spare {i}" for i in range(len(self._standbys))), self._standbys, strict=True))
        calls = {n: answer(n, each.handle.bound_to.remote()) for n, each in free.items() if each.key is None}
        devices = {name: each.key[1] for name, each in free.items() if each.key}
        devices |= (await gather_named(calls, "start", answer_s)).answers
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
