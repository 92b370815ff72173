"""The public API: register trainers and engines, connect them, update weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle

from weightsync.actors.adapter_methods import AdapterMethods
from weightsync.actors.adapters import Adapters
from weightsync.actors.checkpoint_methods import CheckpointMethods
from weightsync.actors.checkpoints.followed_store import FollowedStore
from weightsync.actors.expert_methods import ExpertMethods
from weightsync.actors.fleet_methods import FleetMethods
from weightsync.actors.holders.detached import run_prefix
from weightsync.actors.injection import Injection
from weightsync.actors.joint_update import JointPart, update_together
from weightsync.actors.membership import Membership
from weightsync.actors.models import MODEL, Model, Models
from weightsync.actors.own_actor import check_own_actor
from weightsync.actors.progress import wait_with_bar
from weightsync.actors.ray.adoption import Adoption, Where
from weightsync.actors.ray.handles import check_deployments, check_engines, check_trainers, check_version
from weightsync.actors.ray.loop import LoopThread, Submitted
from weightsync.actors.ray.metrics import Metrics
from weightsync.actors.servers.door import with_ranks, with_servers
from weightsync.actors.servers.handle import EngineHandle
from weightsync.actors.sleep_methods import SleepMethods
from weightsync.config import SyncConfig
from weightsync.driver.events import EngineFailed, EngineHealed
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.healing.healing import Healer
from weightsync.driver.updating.controller import Controller
from weightsync.driver.updating.joint_commit import JointMember
from weightsync.driver.updating.takeover import note_served
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError, WeightSyncError, nearest
from weightsync.faults import FaultPlan
from weightsync.plan import Cluster
from weightsync.protocol.log_level import log_level, use_log_level
from weightsync.report import SyncReport
from weightsync.text import count_text

_POLL_S = 0.02


class WeightSync(FleetMethods, AdapterMethods, CheckpointMethods, ExpertMethods, SleepMethods):
    """Moves new weights from trainer actors to engine actors, version after version::

        sync = WeightSync(SyncConfig(timeout_s=60))
        sync.register_trainers(trainer_handles)          # actors derived from TrainerShard
        sync.register_engines({"e0": handle})            # EngineActor handles, or derived from VllmActor
        sync.connect()
        for version in range(1, 100):
            ...                                          # train
            report = sync.update_weights(version)
        sync.close()

    Use a WeightSync from one thread at a time. All work runs on another thread. A WeightSync raises
    WeightSyncErrors, and is a context manager that calls `close`.

    Args:
        config: settings; ``SyncConfig()`` if left out.
        name: with a name, holders outlive this process until `close`. If this driver dies, a new one with the
            same name, trainers and engines takes over: `connect` continues from the committed version. One
            driver at a time may use a name. Holders are detached actors in Ray's namespace ``weightsync``,
            called ``weightsync/<name>/<node>/<device>``.
        cluster: bandwidths of the links. Metrics then compare an update with the time that the links allow.

    Raises:
        ConfigError: `config` is not a SyncConfig, `name` is not valid, or the environment variable
            ``WEIGHTSYNC_LOG_LEVEL`` is not a level.
    """

    def __init__(
        self, config: SyncConfig | None = None, *, name: str | None = None, cluster: Cluster | None = None
    ) -> None:
        if not isinstance(config, SyncConfig | None):
            raise ConfigError("config", config, "give a SyncConfig, or SyncConfig.from_dict(…)")
        if name is not None:
            run_prefix(name)
        use_log_level(log_level())
        self.name = name
        self.config = config or SyncConfig()
        self._fleet = Fleet([], {}, [], share=ray.put)
        self._controller = Controller(self.config, self._fleet)
        self._members = members = Membership(self.config, self._fleet, self._controller, name)
        parts = self.config, self._fleet, self._controller
        self._healer = Healer(*parts, members.lost.respawn, members.lost.can_respawn, members.lost.rejoin)
        self._adapters = Adapters(self.config, members, self._controller)
        self._stores: dict[str, FollowedStore] = {}
        self._last: SyncReport | None = None
        self._injection = Injection(self._fleet, self.config.timeout_s)
        self._metrics = Metrics(cluster)
        self._controller.events.subscribe(EngineHealed, self._healed)
        self._controller.events.subscribe(
            EngineFailed, lambda event: self._metrics.failure(event.name, event.error)
        )
        self._cluster, self._models = cluster, Models[WeightSync]()
        self._loop = LoopThread()

    def add_model(self, name: str, config: SyncConfig | None = None) -> WeightSync:
        """Return a WeightSync for another model, such as a reward model or a second policy.

        Register the model's trainers and engines with the returned WeightSync. Its other methods concern only
        that model, too: `serving`, `heal`, `update_weights`. `connect` and `close` of this WeightSync include
        the model, `update_weights` can commit it together with other models, and `coverage` lists it. Give
        engines of all models different names. If you close the returned WeightSync, the model is removed, and
        the name is free.

        Args:
            name: the model's name in `update_weights` and `coverage`.
            config: the model's settings, by default the settings of this WeightSync.

        Raises:
            ConfigError: the name is taken, or cannot be a model's.
        """
        self._models.check(name)
        run = f"{self.name}.{name}" if self.name else None
        sync = WeightSync(config or self.config, name=run, cluster=self._cluster)
        sync._loop.close()
        sync._loop = LoopThread(self._loop)
        self._models.add(name, Model(sync, sync._loop, sync._as_part))
        return sync

    def register_trainers(
        self,
        handles: Sequence[ActorHandle[Any]] | int,
        model: Where | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the trainers. `connect` has to follow. Processes of holders start in the background.

        Args:
            handles: all trainer ranks in rank order, handles of actors derived from `TrainerShard`, or with
                `model` of any class; or the number of ranks that Ray did not start and that dial in, see
                `weightsync.join`.
            model: where each actor has its model: a path of attributes such as ``actor.model``, or a
                function of the actor, which Ray has to be able to pickle.
            options: with `model`, arguments of `TrainerShard`, such as ``exclude``.

        Raises:
            ConfigError: the list is empty, or an entry is something else or is given twice.
        """
        if options and model is None:
            raise ConfigError("options", options, "give them with model=, or to TrainerShard")
        known = with_ranks(handles, self.config)
        check_trainers(known, "" if model is None else "model")
        self._members.models = Adoption("trainer", model, options or {}) if model is not None else None
        self._members.register_trainers(known)
        self._registered()

    def register_engines(
        self,
        handles: Mapping[str, ActorHandle[Any] | str],
        respawn: Callable[[str], ActorHandle[Any]] | None = None,
        deployments: Mapping[str, Sequence[str]] | None = None,
        llm: Where | None = None,
    ) -> None:
        """Set the engines. `connect` has to follow. Processes of holders start in the background.

        Args:
            handles: by the name that reports use, handles of `EngineActor` or of actors derived from
                `VllmActor`, or with `llm` of any class; or URLs such as ``http://10.0.0.7:8000`` of servers
                that Ray did not start and that dial in, see docs/servers.md.
            respawn: called with an engine's name when the engine's process is gone. It starts another actor,
                with dummy weights and on the same resources, and returns the actor's handle. It runs on a
                thread. If it takes longer than ``config.respawn_timeout_s``, the engine stays DEAD, and an
                actor that is returned later is killed. Without `respawn`, dead engines stay DEAD until
                `add_engine`.
            deployments: engines that serve one version together, by a name of your choice, such as prefill
                and decode engines, which exchange KV. `serving` names all engines of a deployment or none.
                See docs/components.md.
            llm: where each actor has the engine, as `model` of `register_trainers`: an ``AsyncLLM`` of vLLM,
                started with ``worker_extension_cls="weightsync.WeightSyncWorker"``, or an `Engine` of your
                own. An actor without coroutines does not answer heartbeats while one of its methods runs.

        Raises:
            ConfigError: the mapping is empty, an entry is something else or is given twice, `respawn`
                cannot be called, or a deployment names an engine that is not registered, or is in another.
        """
        known = with_servers(handles, self.config, self._members.door)
        check_engines(known, "" if llm is None else "llm")
        check_deployments(deployments or {}, known)
        if respawn is not None and not callable(respawn):
            raise ConfigError("respawn", respawn, "give a function of an engine's name that starts its actor")
        self._members.engines, self._members.lost.respawner = dict(known), respawn
        self._members.llms = Adoption("engine", llm) if llm is not None else None
        self._fleet.deployments = {name: tuple(members) for name, members in (deployments or {}).items()}
        self._registered()

    def connect(self) -> None:
        """Start holders, make the plan, open all connections and use every connection once.

        With a `name`, `connect` takes over the holders that an earlier driver left. `version` is then the
        newest version that an engine serves or that holders keep whole. Engines that do not serve this
        version are refilled if holders keep it, else they get the next update. Without a `name`, `version` is
        0. The first update then needs a greater number than the versions that engines served for an earlier
        WeightSync, also if they are paused now.

        Raises:
            PlanError: the trainers' tensors do not fit the engines'; names the tensor.
            ConfigError: a setting does not fit, two actors claim one GPU or slot, fewer engines are
                registered than ``config.min_engines``, or this is a method of one of the actors, which
                could not answer.
            StateError: trainers or engines are not registered, or another WeightSync whose process is
                alive has connected one of the actors; names it.
            DeadlineError: a process did not answer within ``config.connect_timeout_s``; names it.
        """
        check_own_actor(self._members.trainers, self._members.engines)
        wait_with_bar(self._loop.submit(self._connect), "connect", self._controller.connected_share)
        self._models.connect()

    def settle(self, timeout_s: float) -> None:
        """Wait until no engine is being healed and the committed version has been copied.

        Args:
            timeout_s: seconds to wait.

        Raises:
            DeadlineError: engines are still being healed, or holders still copy, or allocate memory for it.
        """
        deadline = time.monotonic() + timeout_s

        async def settled() -> None:
            while (busy := self._healer.busy()) and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            if busy:
                raise DeadlineError("heal", [f"engine {name}" for name in busy], timeout_s)
            copied = {"holders": self._controller.snapshot_index.settled()}
            left_s = max(0.0, deadline - time.monotonic())
            (await gather_named(copied, "copying the committed version", left_s)).require()

        self._loop.run_concurrently(settled()).result()

    def inject(self, plan: FaultPlan) -> None:
        """Inject faults, when the fault's version is made. See `weightsync.testing`.

        Raises:
            ConfigError: a fault names a process that does not take part.
            StateError: before `connect`.
        """
        if self._controller.plan is None:
            raise StateError("call connect() before inject()")
        trainers = [f"trainer {i}" for i in range(len(self._members.trainers))]
        engines = [f"engine {name}" for name in self._members.engines]
        plan.check_processes([*trainers, *self._fleet.named_holders(), *engines])
        self._loop.submit(lambda: self._injection.begin(plan)).result()

    def update_weights(
        self, version: int | None = None, *, checkpoint: str = "", components: Sequence[str] = ()
    ) -> SyncReport:
        """Move the trainers' weights to all engines. Returns when engines serve them.

        The phases are publish, pause, move, verify, commit. An engine that fails is left out and healed in
        the background. A version that did not commit may be tried again, but not with other weights if an
        engine may serve it.

        Wait for your own calls of trainers first, with `ray.get`: their weights have to be final. Ranks that
        Ray did not start are waited for until they call `JoinedTrainer.update`.

        If the call is interrupted, as by Ctrl-C, the update continues. The next call waits for its end.

        Args:
            version: a whole number greater than the last version, and than the versions that engines served
                before they were connected; by default the least such number.
            checkpoint: the registered checkpoint to move, or the store whose newest version to move, if there
                are no trainers. The call waits until the checkpoint is read.
            components: the components to update together: ``model``, names of `add_model`, and adapters, such
                as ``adapter math``. No component commits before all have the version; if one fails, none
                commits. By default only ``model``.

        Returns:
            The report of the update, with durations.

        Raises:
            StateError: before `connect`, or while another update runs.
            ConfigError: `version` is not such a number, `checkpoint` is not registered, or a component is
                not there.
            StoreError: an object of the store is missing or damaged, or the store cannot be read.
            WeightSyncError: fewer than ``config.min_engines`` took the version; the error is the first cause.
        """
        # Not after a wait for `held`: this thread would wake, and take the interpreter's lock, just before
        # the loop tells engines to serve.
        update = self._begin_update(version, checkpoint, components, Future())
        if not checkpoint:
            return update.result()
        read = self._stores[checkpoint].checkpoint if checkpoint in self._stores else checkpoint
        return wait_with_bar(update, f"read {read}", partial(self._members.checkpoints.read_share, read))

    def update_weights_async(
        self, version: int | None = None, *, checkpoint: str = "", components: Sequence[str] = ()
    ) -> Submitted[SyncReport]:
        """As `update_weights`, but return as soon as trainers may change their weights.

        That is when the holders have every byte, or the update has ended. In asyncio and notebooks, await the
        future: ``report = await sync.update_weights_async()``. Until the call returns, it blocks the loop. If
        the loop has other work, call ``await asyncio.to_thread(sync.update_weights_async)`` for the future.

        Returns:
            A future with the report, or with the error that `update_weights` would raise: call ``result()``,
            or await it.
        """
        held: Future[None] = Future()
        report = self._begin_update(version, checkpoint, components, held)
        either: list[Future[Any]] = [held, report]
        wait(either, return_when=FIRST_COMPLETED)
        report.caller = None  # from now on it is for the user to wait
        return report

    def _begin_update(
        self, version: int | None, checkpoint: str, components: Sequence[str], held: Future[None]
    ) -> Submitted[SyncReport]:
        try:
            self._loop.end_interrupted()  # it may commit a version
            if store := self._stores.get(checkpoint):
                self._follow(store)
                checkpoint = store.checkpoint
            others = self._adapters.parts()
            others[MODEL] = partial(self._as_part, checkpoint)
            parts = self._models.parts(components or [MODEL], others)
            number = check_version(version, max(part.version for part in parts.values()))
            loops = self._models.loops(components)
            return self._loop.submit(lambda: update_together(parts, number, held), loops)
        except WeightSyncError as error:
            refused: Submitted[SyncReport] = Submitted()
            refused.set_exception(error)
            return refused

    def add_engine(self, name: str, handle: ActorHandle[Any] | str) -> SyncReport | None:
        """Add an engine, or replace a dead one of the same name.

        Args:
            name: the name that reports use.
            handle: as of `register_engines`.

        Returns:
            The report of the engine's refill from the holders. None if holders have no version for the
            engine: it then serves from the next update on.

        Raises:
            ConfigError: a living engine has this name or uses a GPU of the new engine, or the actor is
                registered already or is not an engine.
            WeightSyncError: as `connect`, or the refill failed. The engine has not joined. A dead one of the
                name is healed as before.
        """
        others = {other: known for other, known in self._members.engines.items() if other != name}
        known = with_servers({name: handle}, self.config, self._members.door)
        check_engines({**others, **known}, "llm" if self._members.llms else "")
        check_own_actor((), known)
        return self._loop.submit(lambda: self._join(name, known[name])).result()

    def remove_engine(self, name: str) -> None:
        """Remove an engine. The engine's actor keeps running.

        Raises:
            ConfigError: no engine has this name, or it is the last one.
        """
        self._known(name)
        if len(self._members.engines) == 1:
            raise ConfigError("engine", name, "it is the last one: close() instead")
        self._loop.submit(lambda: self._part(name)).result()

    def heal(self, name: str) -> SyncReport:
        """Refill an engine from the holders, without asking the trainers.

        Returns:
            The report of the refill.

        Raises:
            ConfigError: no engine has this name.
            StateError: the engine is DEAD (use `add_engine`), or holders have no version that it can take.
            WeightSyncError: the refill failed; the engine is STALE or DEAD.
        """
        self._known(name)
        return self._loop.submit(lambda: self._members.heal(name)).result()

    def close(self) -> None:
        """End the holders, also named ones. Trainers and engines keep running. Safe to call twice.

        An update that runs ends first, since the engines would stay paused.
        """
        self._models.close()
        if self._loop.shut():
            self._loop.run_concurrently(self._close()).result()
            self._loop.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _close(self) -> None:
        await self._controller.close()
        for name in self._healer.busy():
            self._healer.forget(name)
        await self._adapters.close()
        await self._members.close()

    async def _connect(self) -> None:
        least, there = self.config.min_engines, len(self._members.engines)
        if 0 < there < least:
            remedy = f"{count_text(there, 'engine')} registered: give at most {there}, or register more"
            raise ConfigError("sync.min_engines", least, remedy)
        async with self._controller.exclusive():
            await self._members.connect()
            is_first = not self._controller.version
            stale = await self._controller.restore() if is_first and self.name is not None else []
            if is_first:
                await note_served(self._fleet, self.config, self._controller.engine_group.told[0])
        refills = (self._controller.refill(name) for name in stale if self._controller.can_refill(name))
        for error in await asyncio.gather(*refills, return_exceptions=True):
            # An engine that failed is healed, or takes the next version.
            if isinstance(error, BaseException) and not isinstance(error, WeightSyncError):
                raise error
        self._adapters.follow()

    def _as_part(self, checkpoint: str = "") -> JointPart:
        prepare, move = partial(self._choose, checkpoint), partial(self._move, checkpoint)
        return JointPart(self._controller.newest, prepare, self._members.exclusive, move)

    async def _move(
        self, checkpoint: str, version: int, when_held: Callable[[], None], joint: JointMember | None
    ) -> SyncReport:
        await self._members.reconnect()
        if version > self.version:
            await self._injection.arm(version)
        try:
            report = await self._controller.update(version, when_held, joint)
        except WeightSyncError as error:
            self._metrics.update_failed()
            raise self._members.with_file(error) from error
        asyncio.get_running_loop().call_soon(self._metrics.update, report, self.plan)  # the caller waits
        self._last = report
        return replace(report, checkpoint=checkpoint)

    def _healed(self, event: EngineHealed) -> None:
        self._metrics.heal(event.report)
        self._adapters.follow()

    async def _join(self, name: str, handle: EngineHandle) -> SyncReport | None:
        await self._members.check_free(name)
        was_healed = self._healer.forget(name)
        try:
            report = await self._members.join(name, handle)
        except WeightSyncError:
            if was_healed:
                nobody = EngineError(name, "join", "no other engine has joined")
                self._healer.engine_failed(name, self._controller.engine_group.failures.get(name, nobody))
            raise
        self._adapters.follow()
        return report

    async def _part(self, name: str) -> None:
        self._healer.forget(name)
        await self._members.part(name)
        self._adapters.follow()
        self._metrics.serve({name: 0})

    def _registered(self) -> None:
        self._controller.connected = False
        self._loop.begin(self._members.follow)

    def _known(self, name: str) -> None:
        if name not in self._members.engines:
            raise ConfigError("engine", name, nearest(name, self._members.engines))
