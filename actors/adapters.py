"""LoRA adapters with their own trainers, holders and versions, on the engines of one WeightSync."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from weightsync.actors.coverage import coverage
from weightsync.actors.holders.holder_processes import SharedProcesses
from weightsync.actors.joint_update import JointPart
from weightsync.actors.membership import Membership
from weightsync.actors.ray.adoption import method_of
from weightsync.actors.ray.handles import check_version
from weightsync.actors.ray.remote import answer
from weightsync.actors.servers.door import Door
from weightsync.actors.servers.handle import EngineHandle, no_log
from weightsync.actors.servers.rank import TrainerHandle
from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.healing.healing import Healer
from weightsync.driver.updating.controller import Controller
from weightsync.driver.updating.joint_commit import JointMember
from weightsync.errors import ConfigError, PeerLostError, StateError, WeightSyncError, nearest
from weightsync.protocol.adapters import AdapterSpec
from weightsync.report import Covered, SyncReport

logger = logging.getLogger("weightsync.actors")

_END_S = 90.0
"""Longer than engines wait for requests."""

_BUCKET_NBYTES = 32 << 20
"""The bucket size of adapters that are broadcast. An engine rank has memory for one bucket per adapter."""


class Adapter:
    """One adapter. Between GPUs of one host it is read in place, as a model is."""

    def __init__(
        self,
        spec: AdapterSpec,
        trained: str,
        config: SyncConfig,
        trainers: Sequence[TrainerHandle],
        processes: SharedProcesses,
        door: Door,
    ) -> None:
        """
        Args:
            trained: PEFT's name of the adapter.
            processes: the processes of the holders of all adapters.
            door: where processes that Ray did not start have joined.
        """
        self.spec, self._trained, self._dtype = spec, trained, ""
        self._config = replace(
            config,
            mode="broadcast" if config.mode == "broadcast" else "auto",
            transport="gloo" if config.transport == "gloo" else "auto",
            stage="none",
            bucket_bytes=min(config.bucket_bytes, _BUCKET_NBYTES),
            nonfinite="refuse" if config.nonfinite == "auto" else config.nonfinite,
        )
        self._fleet = Fleet([], {}, [], share=ray.put)
        self._controller = Controller(self._config, self._fleet)
        parts = self._config, self._fleet, self._controller
        self._members = members = Membership(*parts, None, spec, processes, door)
        members.trainers = list(trainers)
        self._healer = Healer(*parts, members.lost.respawn, members.lost.can_respawn, members.lost.rejoin)
        self._following = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: SyncReport | None = None

    @property
    def version(self) -> int:
        """The newest committed version, 0 before the first."""
        return self._controller.version

    async def connect(self, engines: Mapping[str, EngineHandle]) -> None:
        """Take slots on every engine and connect trainers with them. Raises as `WeightSync.connect`."""
        self._members.engines = dict(engines)
        # A driver that died may have left the adapter there, with versions that this one does not know.
        calls = self._calls(engines, "sync_open_adapter")
        dtypes = (await gather_named(calls, "open", self._config.connect_timeout_s)).require()
        self._dtype = next(iter(dtypes.values()))
        await self._cast()
        async with self._controller.exclusive():
            await self._members.connect()

    async def _cast(self) -> None:
        calls = _on_trainers(self._members.trainers, "sync_cast_adapter", self.spec.name, self._dtype)
        (await gather_named(calls, "open", self._config.connect_timeout_s)).require()

    async def update(self, version: int, engines: Mapping[str, EngineHandle]) -> SyncReport:
        """Move a version to every engine. Raises as `WeightSync.update_weights`."""
        await self.follow(engines)
        async with self._members.exclusive():
            return await self._move(version)

    def as_part(self, engines: Mapping[str, EngineHandle]) -> JointPart:
        """Return it as a part of an update of several components."""
        return JointPart(
            self._controller.newest, lambda: self.follow(engines), self._members.exclusive, self._move
        )

    async def _move(
        self, version: int, when_held: Callable[[], None] = lambda: None, joint: JointMember | None = None
    ) -> SyncReport:
        if self._members.has_new_ranks:  # they do not know the adapter yet
            await _open_on_trainers(self._members.trainers, self.spec.name, self._trained, self._config)
            await self._cast()
        await self._members.reconnect()
        self._last = await self._controller.update(version, when_held, joint)
        return self._last

    def coverage(self) -> list[Covered]:
        """Return the coverage of this adapter, per engine."""
        return coverage(f"adapter {self.spec.name}", self._controller, self._fleet, self._last)

    def follow_soon(self, engines: Mapping[str, EngineHandle]) -> None:
        """Call `follow` in the background."""
        task = asyncio.get_running_loop().create_task(self.follow(engines))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def follow(self, engines: Mapping[str, EngineHandle]) -> None:
        """Take in engines that are new, or have a new process, and give them the committed version.

        Those that cannot have it are left out until the next call. The log says why. Engines that were
        removed give their slots back.
        """
        async with self._following:
            gone = {name: held for name, held in self._members.engines.items() if name not in engines}
            for name in gone:
                self._healer.forget(name)
                await self._members.part(name)
            await gather_named(self._calls(gone, "sync_close_adapter"), "close", GRACE_S)
            for name, handle in engines.items():
                if not self._members.knows(name, handle):
                    self._healer.forget(name)
                    try:
                        await self._members.join(name, handle)
                    except WeightSyncError as error:
                        logger.warning("[engine %s] has no adapter %s yet: %s", name, self.spec.name, error)

    async def close(self, engines: Mapping[str, EngineHandle], timeout_s: float) -> None:
        """End the adapter's holders, and give the slots of `engines` back.

        Raises DeadlineError if requests still use the slots then.
        """
        await self._controller.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in self._healer.busy():
            self._healer.forget(name)
        await self._members.close()
        for trainer in self._members.trainers:  # which may be training: nobody waits for them
            closing = asyncio.ensure_future(method_of(trainer, "sync_close_adapter")(self.spec.name))
            closing.add_done_callback(no_log)
        calls = self._calls({**self._members.engines, **engines}, "sync_close_adapter")
        failures = (await gather_named(calls, "close", timeout_s)).failures.values()
        if left := [error for error in failures if not isinstance(error, PeerLostError)]:
            raise left[0]

    def _calls(
        self, engines: Mapping[str, EngineHandle], method: str
    ) -> Mapping[str, Coroutine[Any, Any, Any]]:
        return {
            f"engine {name}": answer(f"engine {name}", method_of(handle, method)(self.spec))
            for name, handle in engines.items()
        }


def _on_trainers(
    trainers: Sequence[TrainerHandle], method: str, *args: str
) -> dict[str, Coroutine[Any, Any, Any]]:
    named = {f"trainer {i}": handle for i, handle in enumerate(trainers)}
    return {name: answer(name, method_of(handle, method)(*args)) for name, handle in named.items()}


async def _open_on_trainers(
    trainers: Sequence[TrainerHandle], name: str, adapter: str, config: SyncConfig
) -> AdapterSpec:
    """Have each trainer prepare to publish PEFT's `adapter` as `name`. Returns the adapter's spec."""
    calls = _on_trainers(trainers, "sync_open_adapter", name, adapter)
    spec: AdapterSpec = (await gather_named(calls, "open", config.connect_timeout_s)).require()["trainer 0"]
    return spec


class Adapters:
    """The adapters of one WeightSync, by name. Methods run on the loop of the WeightSync."""

    def __init__(self, config: SyncConfig, members: Membership, controller: Controller) -> None:
        """`members` and `controller` are the model's."""
        self._config, self._members, self._controller = config, members, controller
        self._processes = SharedProcesses()
        self._held: dict[str, Adapter] = {}

    def _engines(self) -> Mapping[str, EngineHandle]:
        return self._members.engines if self._controller.plan else {}

    async def register(self, name: str, trainers: Sequence[TrainerHandle], adapter: str) -> None:
        """Connect an adapter, see `WeightSync.register_adapter`."""
        if not self._engines():
            raise StateError("connect() comes before register_adapter()")
        if name in self._held:
            raise ConfigError("name", name, "unregister_adapter() comes first: there is one of this name")
        trainers = self._members.expect_ranks(trainers)
        spec = await _open_on_trainers(trainers, name, adapter, self._config)
        new = Adapter(spec, adapter, self._config, trainers, self._processes, self._members.door)
        try:
            await new.connect(self._engines())
        except WeightSyncError:
            await self._closed(new)
            raise
        self._held[name] = new

    async def unregister(self, name: str) -> None:
        """Close an adapter. Raises ConfigError if there is none of this name."""
        held = self._known(name)
        del self._held[name]
        await held.close(self._engines(), _END_S)

    async def update(self, name: str, version: int | None) -> SyncReport:
        """Move a version, by default the next one, of an adapter."""
        held = self._known(name)
        return await held.update(check_version(version, held.version), self._engines())

    def parts(self) -> dict[str, Callable[[], JointPart]]:
        """Return functions that make adapters parts of a joint update, by the component's name."""
        return {
            f"adapter {name}": partial(held.as_part, self._engines()) for name, held in self._held.items()
        }

    def versions(self) -> dict[str, int]:
        """Return the committed version of each adapter."""
        return {name: held.version for name, held in self._held.items()}

    def coverage(self) -> list[Covered]:
        """Return the coverage of all adapters, per engine."""
        return [row for held in self._held.values() for row in held.coverage()]

    def follow(self) -> None:
        """Bring the adapters to engines that are new or have a new process, in the background."""
        for held in self._held.values():
            held.follow_soon(dict(self._engines()))

    async def close(self) -> None:
        """Close all adapters."""
        await asyncio.gather(*map(self._closed, self._held.values()))
        self._held.clear()

    async def _closed(self, adapter: Adapter) -> None:
        """Close an adapter as far as that is possible."""
        try:
            await adapter.close(self._engines(), GRACE_S)
        except WeightSyncError as error:
            logger.warning("[adapter %s] keeps its slots: %s", adapter.spec.name, error)

    def _known(self, name: str) -> Adapter:
        if name not in self._held:
            remedy = nearest(name, self._held) if self._held else "register_adapter() comes first"
            raise ConfigError("name", name, remedy)
        return self._held[name]
