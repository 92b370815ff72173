"""The public door: trainers and engines are registered, connected, and updated."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from weightsync.actors.detached import run_prefix
from weightsync.actors.handles import check_engines, check_trainers
from weightsync.actors.loop import LoopThread
from weightsync.actors.membership import Membership
from weightsync.actors.metrics import Metrics
from weightsync.config import SyncConfig
from weightsync.driver.controller import Controller
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.healing import Healer
from weightsync.errors import ConfigError, DeadlineError, PlanError, StateError, WeightSyncError, nearest
from weightsync.plan import Cluster, Plan
from weightsync.plan.explain import count_text
from weightsync.report import HealReport, Link, SyncReport

if TYPE_CHECKING:
    from weightsync.faults import FaultPlan
    from weightsync.sources.checkpoint import Reading

__all__ = ["WeightSync"]

_POLL_S = 0.02


class WeightSync:
    """Moves weights from trainer actors to engine actors, version by version::

        sync = WeightSync(SyncConfig(timeout_s=60))
        sync.register_trainers(trainer_handles)          # actors derived from TrainerShard
        sync.register_engines({"e0": handle})            # EngineActor handles, or derived from VllmActor
        sync.connect()
        for version in range(1, 100):
            ...                                          # train
            report = sync.update_weights(version)
        sync.close()

    One thread uses it at a time; calls that Ray's event loop needs run on a thread of its own.
    Errors are those of `weightsync.errors`.
    """

    def __init__(
        self, config: SyncConfig | None = None, *, name: str | None = None, cluster: Cluster | None = None
    ) -> None:
        """With a `name`, the holders outlive this process, until `close`.

        They are detached actors ``weightsync/<name>/<node>/<device>`` in Ray's namespace
        ``weightsync``. If this driver dies, one that is given the same name, trainers and engines
        finds them: `connect` then takes their committed version over. One driver at a time may use a
        name. Raises ConfigError for a setting, or a name, that is not valid.

        `cluster` says what the links can do, so that metrics can say how near an update came.
        """
        if not isinstance(config, SyncConfig | None):
            raise ConfigError("config", config, "give a SyncConfig, or SyncConfig.from_dict(…)")
        if name is not None:
            run_prefix(name)
        self.name = name
        self.config = config or SyncConfig()
        self._fleet = Fleet([], {}, [])
        self._controller = Controller(self.config, self._fleet)
        self._members = members = Membership(self.config, self._fleet, self._controller, name)
        self._healer = Healer(
            self.config, self._fleet, self._controller, members.respawn, members.can_respawn
        )
        self._faults: FaultPlan | None = None
        self._armed: set[int] = set()
        self._metrics = Metrics(cluster)
        self._healer.on_heal = self._metrics.heal
        self._controller.crew.on_failure = self._engine_failed
        self._loop = LoopThread()

    def register_trainers(self, handles: Sequence[ActorHandle[Any]]) -> None:
        """All trainer ranks, in rank order: handles of actors derived from `TrainerShard`.

        Raises ConfigError when there are none, or one is something else, or given twice.
        """
        check_trainers(handles)
        self._members.trainers = list(handles)
        self._controller.connected = False

    def register_engines(
        self,
        handles: Mapping[str, ActorHandle[Any]],
        respawn: Callable[[str], ActorHandle[Any]] | None = None,
    ) -> None:
        """All engines, by the names that reports use: handles of `EngineActor`, or derived from `VllmActor`.

        `respawn` starts another actor for the engine of that name, with dummy weights, on the same
        resources; engines whose process is gone are brought back with it. It runs on a thread of its own.
        An engine for which it does not return within ``config.respawn_timeout_s`` stays DEAD; an actor that
        it returns after that is killed.

        Raises ConfigError when there are none, or one is something else, or given twice.
        """
        check_engines(handles)
        if respawn is not None and not callable(respawn):
            raise ConfigError("respawn", respawn, "give a function of an engine's name that starts its actor")
        self._members.engines, self._members.respawner = dict(handles), respawn
        self._controller.connected = False

    def register_checkpoint(
        self,
        name: str,
        files: Sequence[str],
        *,
        nodes: Sequence[str] | None = None,
        exclude: Collection[str] = (),
    ) -> Future[Reading]:
        """Begin to read a checkpoint, which takes the trainers' place: see docs/checkpoints.md.

        Args:
            files: safetensors files, index files, or folders that hold either.
            nodes: Ray's ids of the hosts that read, each an equal share; else this process's own.
            exclude: tensors that no engine wants.

        Returns when all headers are checked; the future holds what was read. Raises ConfigError or
        PlanError for files that cannot be used, naming file and tensor.
        """
        on = nodes or [ray.get_runtime_context().get_node_id()]
        self._loop.beside(self._members.register_checkpoint(name, files, on, exclude)).result()
        return self._loop.beside(self._members.checkpoints.read(name))

    def unregister_checkpoint(self, name: str) -> None:
        """Free its memory. Engines go on serving it. Raises ConfigError for one that is not registered."""
        self._loop.submit(lambda: self._members.unregister_checkpoint(name)).result()

    def connect(self) -> None:
        """Start holders, make the plan, open and use every path once.

        With a `name`, holders that an earlier driver left are taken over. `version` is then the newest
        that an engine serves or that they keep whole; engines that serve another, or none, are filled
        with it from the holders if they keep it, else by the next update.

        Raises:
            PlanError: the trainers' tensors are not what the engines need; names the tensor.
            ConfigError: a setting does not fit, two actors claim one GPU or slot, or fewer engines are
                registered than ``config.min_engines``.
            StateError: another WeightSync has connected one of the actors, has not been closed, and its
                process lives; names it.
            DeadlineError: names who did not come within ``config.connect_timeout_s``.
        """
        self._loop.submit(self._connect).result()

    @property
    def plan(self) -> Plan:
        """The plan in use. Raises StateError before `connect`."""
        if self._controller.plan is None:
            raise StateError("connect() has to come before plan")
        return self._controller.plan

    def links(self) -> list[Link]:
        """The bytes of an update by where they go. Raises StateError before `connect`."""
        return self._controller.links()

    @property
    def version(self) -> int:
        """The newest committed version, 0 before the first."""
        return self._controller.version

    def engine_versions(self) -> dict[str, int]:
        """The version that each engine serves, or sleeps with; 0 while it holds none."""
        return {name: seat.record.version for name, seat in self._fleet.engines.items()}

    def engine_states(self) -> dict[str, EngineState]:
        """The state of each engine."""
        return {name: seat.record.state for name, seat in self._fleet.engines.items()}

    def serving(self) -> dict[str, ActorHandle[Any]]:
        """The engines that serve a committed version: whom to hand a request."""
        serves = (EngineState.SERVING, EngineState.PAUSED)
        seats = self._fleet.engines
        return {
            name: handle
            for name, handle in self._members.engines.items()
            if name in seats and seats[name].record.version and seats[name].record.state in serves
        }

    @property
    def heals(self) -> tuple[HealReport, ...]:
        """Every engine that failed and came back, in the order of their return."""
        return tuple(self._healer.heals)

    def settle(self, timeout_s: float) -> None:
        """Wait until no engine is being healed, and holders and mirrors keep the committed version.

        Raises DeadlineError, which names the engines that are not.
        """
        deadline = time.monotonic() + timeout_s

        async def settled() -> None:
            while (busy := self._healer.busy()) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            if busy:
                raise DeadlineError("heal", [f"engine {name}" for name in busy], timeout_s)
            await self._controller.keeping.settled()

        self._loop.beside(settled()).result()

    def inject(self, plan: FaultPlan) -> None:
        """Have faults happen to this fleet, each when its version is made: see `weightsync.testing`.

        Raises ConfigError for a fault of somebody who does not take part; StateError before `connect`.
        """
        if self._controller.plan is None:
            raise StateError("connect() has to come before inject()")
        plan.check_who(self._members.who())
        self._faults, self._armed = plan, set()
        self._loop.submit(lambda: self._members.arm(plan, 0)).result()

    def update_weights(self, version: int | None = None, *, checkpoint: str = "") -> SyncReport:
        """Publish, pause, move, verify, commit, resume; returns when it is served.

        The trainers publish or, where none are registered, `checkpoint`, of which it waits for the
        reading.

        Args:
            version: a whole number, greater than the last; the next one if it is not given.
            checkpoint: one that is registered.

        Raises:
            StateError: before `connect`, or while another update runs.
            ConfigError: `version` is no such number, or `checkpoint` is not registered.
            WeightSyncError: fewer than ``config.min_engines`` took it; the next call starts afresh.
        """
        return self.update_weights_async(version, checkpoint=checkpoint).result()

    def update_weights_async(self, version: int | None = None, *, checkpoint: str = "") -> Future[SyncReport]:
        """As `update_weights`, but returns as soon as the holders have every byte: the trainers may go on.

        The future holds the report, or the exception that `update_weights` would raise.
        """
        held: Future[None] = Future()
        try:
            number = self._whole(version)
            report = self._loop.submit(lambda: self._update(number, checkpoint, held))
        except (ConfigError, StateError) as error:
            refused: Future[SyncReport] = Future()
            refused.set_exception(error)
            return refused
        either: list[Future[Any]] = [held, report]
        wait(either, return_when=FIRST_COMPLETED)
        return report

    def add_engine(self, name: str, handle: ActorHandle[Any]) -> SyncReport | None:
        """Let an engine join, or take the place of a dead one of that name.

        It is filled with the committed version from the holders, if they keep it, without asking the
        trainers; else it serves from the next update on, and None is returned. Raises ConfigError
        when a living engine has the name, or another one is this actor, or it is no engine's actor; else
        as `connect`. It has not joined then.
        """
        others = {other: known for other, known in self._members.engines.items() if other != name}
        check_engines({**others, name: handle})
        return self._loop.submit(lambda: self._join(name, handle)).result()

    def remove_engine(self, name: str) -> None:
        """Let an engine go. Its actor is not touched. Raises ConfigError for the last one."""
        self._known(name)
        if len(self._members.engines) == 1:
            raise ConfigError("engine", name, "it is the last one: close() instead")
        self._loop.submit(lambda: self._part(name)).result()

    def heal(self, name: str) -> SyncReport:
        """Bring a STALE engine to the version that the holders keep, without asking the trainers.

        Raises StateError for a DEAD one, whose place `add_engine` fills.
        """
        self._known(name)
        return self._loop.submit(lambda: self._heal(name)).result()

    def sleep(self, engines: Collection[str] = (), *, level: int = 2) -> None:
        """Have engines give their GPU memory back, for a trainer to use; all of them if none is named.

        They pause as ``config.pause`` says, and refuse requests until the next `update_weights`, which takes
        the memory of their weights back, writes and verifies these, then takes back that of caches, and
        serves. With `level` 1 weights are kept on the host, so that `wake` serves them again; 2 drops them.
        See docs/guide.md.

        One that sleeps already is left as it is.

        Raises:
            StateError: before `connect`, or while an update runs.
            ConfigError: `level` is not 1 or 2, no engine has such a name, or one was not started to sleep.
            DeadlineError: an engine did not pause in time; it serves on.
            EngineError: an engine failed with its memory half given back, and is STALE.
            PeerLostError: an engine's process is gone.
        """
        if level not in (1, 2):
            remedy = "give 1, which keeps weights on the host, or 2, which drops them"
            raise ConfigError("level", level, remedy)
        self._loop.submit(lambda: self._sleep(engines, level)).result()

    def wake(self, engines: Collection[str] = ()) -> None:
        """Have engines that sleep serve the same version again; all of them if none is named.

        Raises:
            StateError: before `connect`, or for one that sleeps with level 2: `update_weights` wakes it, or
                `heal`, with the version that the holders keep.
            ConfigError: no engine has such a name.
            DeadlineError: an engine did not wake in time.
            EngineError: an engine found no memory, and is STALE.
            PeerLostError: an engine's process is gone.
        """
        self._loop.submit(lambda: self._wake(engines)).result()

    def close(self) -> None:
        """End the holders, named ones too, and the thread. Engines and trainers are the caller's.

        Safe to call twice.
        """
        if self._loop.shut():
            self._loop.beside(self._controller.keeping.stop()).result()  # it would warn of holders that end
            self._members.close()
            self._loop.beside(self._members.release()).result()
            self._loop.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _connect(self) -> None:
        least, there = self.config.min_engines, len(self._members.engines)
        if 0 < there < least:
            remedy = f"{count_text(there, 'engine')} registered: give at most {there}, or register more"
            raise ConfigError("sync.min_engines", least, remedy)
        async with self._controller.alone():
            await self._members.connect()
            found_any = self.name is not None and not self._controller.version
            stale = await self._controller.restore() if found_any else []
        refills = (self._controller.refill(name) for name in stale if self._controller.can_refill(name))
        for error in await asyncio.gather(*refills, return_exceptions=True):
            # Who failed is healed, or takes the next version.
            if isinstance(error, BaseException) and not isinstance(error, WeightSyncError):
                raise error

    def _whole(self, version: int | None) -> int:
        """The number of a version; NumPy's integers are numbers, too, True is none."""
        if version is None:
            return self.version + 1
        if not isinstance(version, bool):
            with suppress(TypeError):
                return operator.index(version)
        raise ConfigError("version", version, f"give a whole number, such as {self.version + 1}, or nothing")

    async def _update(self, version: int, checkpoint: str, held: Future[None]) -> SyncReport:
        await self._members.choose(checkpoint)
        async with self._controller.alone():
            await self._members.reconnect()
            if self._faults and version not in self._armed:
                self._armed.add(version)
                await self._members.arm(self._faults, version)
            self._members.take_spans()  # what an update that failed left
            try:
                report = await self._controller.update(version, lambda: held.set_result(None))
            except WeightSyncError as error:
                self._metrics.update_failed()
                raise self._members.told(error) from error
            self._metrics.update(report, self.plan)
            spans = {**report.spans, **self._members.take_spans()}
            return replace(report, spans=spans, checkpoint=checkpoint)

    def _engine_failed(self, name: str, error: WeightSyncError) -> None:
        self._metrics.failure(name, error)
        self._healer.engine_failed(name, error)

    async def _heal(self, name: str) -> SyncReport:
        if self.engine_states()[name] is EngineState.DEAD:
            raise StateError(f"engine {name} is dead: bring another with add_engine()")
        await self._controller.adopt(name)
        return await self._controller.refill(name)

    async def _join(self, name: str, handle: ActorHandle[Any]) -> SyncReport | None:
        if name in self._members.engines and await self._members.is_alive(name):
            raise ConfigError("engine", name, f"choose a name other than {', '.join(self._members.engines)}")
        before = self._members.engines.pop(name, None), self._fleet.engines.pop(name, None)
        self._healer.forget(name)
        try:
            await self._members.take_seat(name, handle)
            try:
                await self._controller.adopt(name)
            except PlanError:  # unlike all others: the plan has to have a place for it
                async with self._controller.alone():
                    await self._members.connect()
            return await self._controller.refill(name) if self._controller.can_refill(name) else None
        except WeightSyncError:
            self._members.engines.pop(name, None)
            self._fleet.engines.pop(name, None)
            if before[0] is not None and before[1] is not None:
                self._members.engines[name], self._fleet.engines[name] = before[0], before[1]
            raise

    async def _part(self, name: str) -> None:
        self._healer.forget(name)
        await self._members.part(name)
        self._metrics.serve({name: 0})

    async def _sleep(self, engines: Collection[str], level: int) -> None:
        gone = (EngineState.DEAD, EngineState.ASLEEP)
        awake = [name for name, state in self._states(engines).items() if state not in gone]
        async with self._controller.alone():
            await self._controller.sleep(awake, level)

    async def _wake(self, engines: Collection[str]) -> None:
        asleep = [name for name, state in self._states(engines).items() if state is EngineState.ASLEEP]
        async with self._controller.alone():
            await self._controller.wake(asleep)

    def _states(self, engines: Collection[str]) -> dict[str, EngineState]:
        states = {name: seat.record.state for name, seat in self._fleet.engines.items()}
        if not states:
            raise StateError("connect() has to come before sleep() and wake()")
        for name in engines:
            if name not in states:
                raise ConfigError("engine", name, nearest(name, states))
        return {name: state for name, state in states.items() if name in (engines or states)}

    def _known(self, name: str) -> None:
        if name not in self._members.engines:
            raise ConfigError("engine", name, nearest(name, self._members.engines))
