"""The public door: trainers and engines are registered, connected, and updated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle

from actors.remote import RemoteEngine, RemoteHolder, RemoteTrainer
from actors.seat import Seat, seat_everybody
from actors.weight_holder import spawn_holder
from weightsync.config import SyncConfig
from weightsync.controller import Controller
from weightsync.deadline import gather_named
from weightsync.errors import ConfigError, StateError, WeightSyncError, nearest
from weightsync.peers import EngineSeat, Fleet
from weightsync.plan import Plan
from weightsync.report import SyncReport
from weightsync.states import EngineRecord, EngineState

__all__ = ["WeightSync"]

T = TypeVar("T")


class WeightSync:
    """Moves weights from trainer actors to engine actors, version by version::

        sync = WeightSync(SyncConfig(timeout_s=60))
        sync.register_trainers(trainer_handles)          # actors derived from TrainerShard
        sync.register_engines({"e0": handle})            # EngineActor handles
        sync.connect()
        for version in range(1, 100):
            ...                                          # train
            report = sync.update_weights(version)
        sync.close()

    One thread uses it at a time; calls that Ray's event loop needs run on a thread of its own.
    Errors are those of `weightsync.errors`.
    """

    def __init__(self, config: SyncConfig | None = None) -> None:
        if not isinstance(config, SyncConfig | None):
            raise ConfigError("config", config, "give a SyncConfig, or SyncConfig.from_dict(…)")
        self.config = config or SyncConfig()
        self._trainers: list[ActorHandle[Any]] = []
        self._engines: dict[str, ActorHandle[Any]] = {}
        self._holders: dict[tuple[str, str], RemoteHolder] = {}
        self._transport = ""
        self._fleet = Fleet([], {}, [])
        self._controller = Controller(self.config, self._fleet)
        self._lock = threading.Lock()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weightsync", daemon=True)
        self._thread.start()

    def register_trainers(self, handles: Sequence[ActorHandle[Any]]) -> None:
        """All trainer ranks, in rank order. Raises ConfigError when there are none."""
        if not handles:
            raise ConfigError("trainers", list(handles), "give at least one actor handle")
        self._trainers = list(handles)
        self._controller.connected = False

    def register_engines(self, handles: Mapping[str, ActorHandle[Any]]) -> None:
        """All engines, by the names that reports use. Raises ConfigError when there are none."""
        if not handles:
            raise ConfigError("engines", dict(handles), "give at least one actor handle")
        self._engines = dict(handles)
        self._controller.connected = False

    def connect(self) -> None:
        """Start holders, make the plan, open and use every path once.

        Raises:
            PlanError: the trainers' tensors are not what the engines need; names the tensor.
            ConfigError: a setting does not fit, or two actors claim one GPU or slot.
            DeadlineError: names who did not come within ``config.connect_timeout_s``.
        """
        self._submit(self._connect).result()

    @property
    def plan(self) -> Plan:
        """The plan in use. Raises StateError before `connect`."""
        if self._controller.plan is None:
            raise StateError("connect() has to come before plan")
        return self._controller.plan

    @property
    def version(self) -> int:
        """The newest committed version, 0 before the first."""
        return self._controller.version

    def engine_versions(self) -> dict[str, int]:
        """The version that each engine serves; 0 while it serves none."""
        return {name: seat.record.version for name, seat in self._fleet.engines.items()}

    def engine_states(self) -> dict[str, EngineState]:
        """The state of each engine."""
        return {name: seat.record.state for name, seat in self._fleet.engines.items()}

    def update_weights(self, version: int) -> SyncReport:
        """Publish, pause, move, verify, commit, resume; returns when it is served.

        Raises:
            StateError: before `connect`, or while another update runs.
            ConfigError: `version` is not greater than the last.
            WeightSyncError: fewer than ``config.min_engines`` took it; the next call starts afresh.
        """
        return self.update_weights_async(version).result()

    def update_weights_async(self, version: int) -> Future[SyncReport]:
        """As `update_weights`, but returns as soon as the holders have every byte: the trainers may go on.

        The future holds the report, or the exception that `update_weights` would raise.
        """
        if not isinstance(version, int) or isinstance(version, bool):
            raise ConfigError("version", version, "give a whole number")
        held: Future[None] = Future()
        report = self._submit(lambda: self._update(version, held))
        either: list[Future[Any]] = [held, report]
        wait(either, return_when=FIRST_COMPLETED)
        return report

    def add_engine(self, name: str, handle: ActorHandle[Any]) -> SyncReport | None:
        """Let an engine join, or take the place of a dead one of that name.

        It is filled with the committed version from the holders, if they keep it, without asking the
        trainers; else it serves from the next update on, and None is returned. Raises ConfigError
        when a living engine has the name, else as `connect`; it has not joined then.
        """
        return self._submit(lambda: self._join(name, handle)).result()

    def remove_engine(self, name: str) -> None:
        """Let an engine go. Its actor is not touched. Raises ConfigError for the last one."""
        self._known(name)
        if len(self._engines) == 1:
            raise ConfigError("engine", name, "it is the last one: close() instead")
        self._submit(lambda: self._part(name)).result()

    def heal(self, name: str) -> SyncReport:
        """Bring a STALE engine to the version that the holders keep, without asking the trainers.

        Raises StateError for a DEAD one, whose place `add_engine` fills.
        """
        self._known(name)
        return self._submit(lambda: self._heal(name)).result()

    def close(self) -> None:
        """End the holders and the thread. Engines and trainers are the caller's. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for holder in self._holders.values():
            ray.kill(holder.handle)
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _update(self, version: int, held: Future[None]) -> SyncReport:
        await self._reconnect()
        return await self._controller.update(version, lambda: held.set_result(None))

    async def _reconnect(self) -> None:
        """Connect again when a member was lost or exchanged since."""
        if not self._controller.connected and self._controller.plan is not None:
            await self._connect()

    async def _heal(self, name: str) -> SyncReport:
        await self._reconnect()
        if self.engine_states()[name] is EngineState.DEAD:
            raise StateError(f"engine {name} is dead: bring another with add_engine()")
        return await self._controller.refill(name)

    async def _join(self, name: str, handle: ActorHandle[Any]) -> SyncReport | None:
        if name in self._engines and await self._is_alive(name):
            raise ConfigError("engine", name, f"choose a name other than {', '.join(self._engines)}")
        before = dict(self._engines)
        self._fleet.engines.pop(name, None)
        self._engines[name] = handle
        try:
            await self._connect()
            return await self._controller.refill(name) if self._controller.refillable else None
        except WeightSyncError:
            self._engines = {other: known for other, known in before.items() if other != name}
            self._fleet.engines.pop(name, None)
            self._controller.connected = False
            raise

    async def _is_alive(self, name: str) -> bool:
        if self.engine_states().get(name) is EngineState.DEAD:
            return False
        ping = {name: RemoteEngine(f"engine {name}", self._engines[name]).seats()}
        return not (await gather_named(ping, "ping", self.config.timeout_s)).failures

    async def _part(self, name: str) -> None:
        del self._engines[name]
        await self._connect()

    async def _connect(self) -> None:
        await self._seat()
        await self._controller.connect()

    async def _seat(self) -> None:
        """Ask everybody where they sit, and start a holder on every seat that has none."""
        if not self._trainers or not self._engines:
            raise StateError("register_trainers() and register_engines() have to come before connect()")
        known = {name: seat.record for name, seat in self._fleet.engines.items()}
        records = {name: known.get(name, EngineRecord()) for name in self._engines}
        trainers = {f"trainer {i}": RemoteTrainer(f"trainer {i}", h) for i, h in enumerate(self._trainers)}
        engines = {name: RemoteEngine(f"engine {name}", h) for name, h in self._engines.items()}
        asked = {
            f"engine {name}": engine.seats()
            for name, engine in engines.items()
            if records[name].state is not EngineState.DEAD
        }
        # Engines take long to start, but those that were connected before should answer at once.
        again = known.keys() >= self._engines.keys()
        timeout_s = self.config.timeout_s if again else self.config.connect_timeout_s
        trainer_seats, engine_seats = await asyncio.gather(
            gather_named({name: trainer.seat() for name, trainer in trainers.items()}, "start", timeout_s),
            gather_named(asked, "start", timeout_s),
        )
        for name, error in engine_seats.failures.items():
            bare = name.removeprefix("engine ")
            if bare not in known or not engine_seats.answers:
                raise error
            records[bare].enter(EngineState.DEAD)
        seating = seat_everybody(trainer_seats.require(), engine_seats.answers)
        await self._start_holders(seating.seats)
        self._fleet.holders[:] = [self._holders[seat.key] for seat in seating.seats]
        self._fleet.trainers[:] = [(t, seating.holder_of[name][0]) for name, t in trainers.items()]
        self._fleet.engines.clear()
        for name, engine in engines.items():
            holders = seating.holder_of.get(f"engine {name}", ())
            self._fleet.engines[name] = EngineSeat(engine, holders, records[name])

    async def _start_holders(self, seats: Sequence[Seat]) -> None:
        # Who has lost its engine may have its memory mapped, which the next one on that GPU needs.
        for key in self._holders.keys() - {seat.key for seat in seats}:
            ray.kill(self._holders.pop(key).handle)
        running = {f"holder on {seat.device}": seat for seat in seats if seat.key in self._holders}
        pings = {name: self._holders[seat.key].ready() for name, seat in running.items()}
        for name in (await gather_named(pings, "ping", self.config.timeout_s)).failures:
            ray.kill(self._holders.pop(running[name].key).handle)
        transport = self._choose_transport(seats)
        if transport != self._transport:
            self._transport = transport
            while self._holders:
                ray.kill(self._holders.popitem()[1].handle)
        for index, seat in enumerate(seats):
            if seat.key not in self._holders:
                name = f"holder {index}"
                self._holders[seat.key] = RemoteHolder(name, spawn_holder(name, seat, transport))

    def _choose_transport(self, seats: Sequence[Seat]) -> str:
        slots = [seat.device for seat in seats if not seat.gpu]
        if self.config.transport == "nccl" and slots:
            raise ConfigError("sync.transport", "nccl", f"{slots[0]} has no GPU: give auto")
        if self.config.transport != "auto":
            return self.config.transport
        return "gloo" if slots else "nccl"

    def _known(self, name: str) -> None:
        if name not in self._engines:
            raise ConfigError("engine", name, nearest(name, self._engines))

    def _submit(self, work: Callable[[], Coroutine[object, object, T]]) -> Future[T]:
        """Run `work` on the loop's thread, alone; its future cannot be cancelled half-way."""
        with self._lock:
            if self._closed:
                raise StateError("this WeightSync is closed: make a new one")
            if not self._last.done():
                raise StateError("an update is running: wait for it to end")
            future: Future[T] = Future()
            future.set_running_or_notify_cancel()
            self._last = future

        async def run() -> None:
            try:
                future.set_result(await work())
            except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
                future.set_exception(error)

        asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
