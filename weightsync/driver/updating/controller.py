"""Takes a fleet from connect through its updates, refills and sleeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from weightsync.config import SyncConfig
from weightsync.deltas.density import densities
from weightsync.driver.agreement import Agreement
from weightsync.driver.connecting.connect import CONNECT_PHASES, Connection, connect
from weightsync.driver.connecting.traffic import links
from weightsync.driver.connecting.ways import settled
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineLeftOut, Events, HolderSilent
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.driver.snapshots.stager import Stager
from weightsync.driver.update_lock import UpdateLock
from weightsync.driver.updating.gpu_peaks import peaks, sampled
from weightsync.driver.updating.joint_commit import JointMember
from weightsync.driver.updating.moved_experts import MovedExperts
from weightsync.driver.updating.refill import Refiller
from weightsync.driver.updating.takeover import take_over
from weightsync.driver.updating.update import Parts, Update
from weightsync.driver.verifying.comparison import Comparison
from weightsync.driver.verifying.frozen import FrozenTensors
from weightsync.driver.verifying.trainers import Trainers
from weightsync.errors import MovedError, StateError
from weightsync.plan import Plan
from weightsync.plan.layout.arrangement import Experts, check_experts
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.messages import Refilled
from weightsync.protocol.timing import PhaseClock
from weightsync.report import Link, SyncReport

logger = logging.getLogger("weightsync.driver")


class Controller:
    """Takes a fleet through one version after another.

    One update or `connect` runs at a time. Between updates, engines are refilled and added in parallel, one
    task for each engine. These tasks stop when an update starts.

    Attributes:
        version: the newest committed version, 0 before the first.
        connected: whether an update may run; False before ``connect`` and after a holder is lost or new.
        update_lock: exclusive in an update, shared in work on one engine.
        engine_group: the engines, and which of them failed.
        snapshot_index: the holders' snapshots of the committed version.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self.version = 0
        self.connected = False
        self.events = Events()
        self.events.subscribe(HolderSilent, self._disconnect)
        self.update_lock = UpdateLock(min(GRACE_S, config.timeout_s))
        self.engine_group = EngineGroup(config, fleet, self.events, self.update_lock)
        self.snapshot_index = SnapshotIndex(config, fleet, self.events, self.engine_group)
        self._trainers = Trainers(config, fleet)
        self._comparison = Comparison(config, fleet, self._trainers, self.snapshot_index.live)
        self._refiller = Refiller(
            config,
            fleet,
            self.events,
            self.engine_group,
            self.snapshot_index,
            self.update_lock,
            self._comparison,
            self.connection,
            lambda: self.version,
        )
        self._epoch = self._nbytes = 0
        self._late: Collection[str] = ()
        self._frozen: FrozenTensors | None = None
        self._stager: Stager | None = None
        self._connection: Connection | None = None
        self._connecting: PhaseClock | None = None
        self._pausing, self._closed = asyncio.Lock(), False

    @property
    def plan(self) -> Plan | None:
        """The plan of the current membership epoch, None before ``connect``."""
        return self._connection.plan if self._connection else None

    @property
    def newest(self) -> int:
        """The newest version that committed, or that engines may serve. 0 if there is none."""
        return max(self._fleet.newest(self.version), self.engine_group.told[0])

    def links(self) -> list[Link]:
        """List which bytes each engine rank gets from where. Raises StateError before ``connect``."""
        return links(self.connection(), self._fleet)

    async def connect(self) -> None:
        """Plan and connect the current fleet. Raises the errors of `connect`."""
        self.connected = False
        await self.snapshot_index.ended()  # or holders would still allocate for the last connect
        self._epoch += 1
        demoted = self._connection.router.demoted if self._connection else {}
        config = settled(self._config, self._fleet)
        self._stager = Stager(config, self._fleet, self.events) if config.stage != "none" else None
        self._connecting = PhaseClock()
        try:
            made = await connect(self._fleet, config, self._epoch, demoted, self._connecting)
        finally:
            self._connecting = None
        if self._connection and self._connection.plan.tensors != made.plan.tensors:
            self.snapshot_index.forget()
        self._connection = made
        replicas = made.plan.replicas
        agreement = Agreement(self._config, self._fleet, made.plan, replicas) if replicas else None
        self._trainers.agreement = agreement
        self._nbytes = made.plan.total_nbytes  # 7 ms for 20,000 tensors
        self._frozen = FrozenTensors(self._comparison, made.plan) if made.plan.frozen else None
        if self._stager:
            await self._stager.reserve()  # the first update needs that memory
        else:
            self.snapshot_index.reserve(made)
        self.connected = True
        serves = f" · v{self.version}" if self.version else ""  # an earlier driver's is not known yet
        logger.info("[driver%s] connected: buckets %d, %s", serves, made.plan.num_buckets, made.seconds)

    def connected_share(self) -> float:
        """Return the share of the phases of `connect` that have ended, 0 unless it runs. For any thread."""
        clock = self._connecting
        return len(clock.seconds) / len(CONNECT_PHASES) if clock else 0.0

    async def restore(self) -> list[str]:
        """Take over from a previous driver, see `take_over`. Must hold the exclusive lock.

        Returns the engines that are STALE.
        """
        parts = self.connection(), self._fleet, self.engine_group, self.snapshot_index
        self.version, stale = await take_over(*parts)
        return stale

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the exclusive lock for ``connect`` or ``update``. Work on single engines stops and waits."""
        async with self.update_lock.exclusive() as late:
            self._late = late
            for name in late:  # the engine's ranks are still busy with work that did not stop
                self._fleet.engines[name].attached = False
                await self.engine_group.drop(self._fleet.engines[name])
                self.engine_group.left_behind(name)
            yield

    async def update(
        self, version: int, when_held: Callable[[], None] = lambda: None, joint: JointMember | None = None
    ) -> SyncReport:
        """Take `version` from the trainers to every live engine that is attached.

        `when_held` is called once trainers may change their weights: holders have every byte or, if trainers
        are read in place, engines have. `joint` waits for other models, see `JointCommit`. If trainers'
        weights moved to other addresses, the controller connects again and repeats the update.

        Raises:
            StateError: not connected, or fewer than ``min_engines`` engines are alive.
            ConfigError: `version` is not greater than the last that committed, or that engines served before.
            WeightSyncError: a failure, if fewer than ``min_engines`` took the version. After a failed publish
                or pause, engines keep their weights, unless bytes moved already; sleeping ones may have been
                woken. After a failed move or comparison they are STALE.
        """
        if not self.connected or self._connection is None:
            raise StateError("call connect() before update_weights()")
        self._fleet.require_newer(version, self.version)
        if self._connection.router.is_unsettled and not await self._refiller.late_reads.finish(
            self._connection
        ):
            await self.connect()
        least = self._config.min_engines
        if len(takers := self._takers()) < least <= len(self._fleet.live()):
            await self.connect()
            takers = self._takers()
        if len(takers) < least:
            alive = "1 engine is alive" if len(takers) == 1 else f"{len(takers)} engines are alive"
            raise StateError(f"{alive}, sync.min_engines is {least}")
        asleep = [member for member in takers.values() if member.record.state is EngineState.ASLEEP]
        clock = PhaseClock()

        async def once() -> SyncReport:
            update = Update(self._parts(), version, self.version, takers, clock, when_held, joint)
            try:
                async with self._open():
                    await update.run()
            finally:
                self.connected = self.connected and not update.breaks_connection
                if update.has_committed:
                    self.version = version
            return self._report(clock, update)

        with collector_paused:  # a collection takes long, and engines are paused
            if not asleep:
                report = await self._connecting_again(once, version)
            else:
                watching = {holder for member in asleep for holder in member.holders}
                async with sampled(self._fleet, watching, clock.now) as seen:
                    report = await self._connecting_again(once, version)
                report = replace(report, peak_memory=peaks(seen, clock.spans))
        for name, member in self._fleet.live().items():
            if not member.attached:
                self.events.publish(EngineLeftOut(name))
        return report

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with self._pausing:
            if self._closed:
                raise StateError("this WeightSync is closed: make a new one")
            yield

    async def close(self) -> None:
        """Refuse updates from now on, and wait for one that runs: its engines would stay paused."""
        self._closed = True
        if self._pausing.locked():
            logger.warning("[driver] waiting for the end of an update before this WeightSync is closed")
        async with self._pausing:
            pass  # it has ended

    def _takers(self) -> dict[str, EngineMember]:
        busy = {name for name in self._late if self.update_lock.is_held(name)}
        live = self._fleet.live().items()
        return {name: each for name, each in live if each.attached and name not in busy}

    async def _connecting_again(
        self, update: Callable[[], Awaitable[SyncReport]], version: int
    ) -> SyncReport:
        """Run `update`, and connect and run it once more if trainers' weights or experts moved."""
        try:
            return await update()
        except MovedError as error:
            logger.info("[driver · v%d] connecting again: %s", version, error)
        await self.connect()
        return await update()

    def _parts(self) -> Parts:
        return Parts(
            self._config,
            self._fleet,
            self.events,
            self.engine_group,
            self.snapshot_index,
            self._trainers,
            self._comparison,
            self._refiller,
            self.connection(),
            self._stager,
            self._frozen,
        )

    async def sleep(self, names: Collection[str], level: int) -> None:
        """Pause engines and release their memory until the next update. Must hold the exclusive lock.

        Raises ConfigError if an engine cannot sleep, and DeadlineError if one does not pause in time. That
        engine is unchanged, and the others sleep.
        """
        await self.snapshot_index.writable(names)  # holders may still copy from the engines' memory
        await self.engine_group.sleep(names, level)

    async def wake(self, names: Collection[str]) -> None:
        """Let engines that sleep with their weights serve them again. Must hold the exclusive lock.

        Raises StateError if an engine's weights were dropped, else the first engine's error: that engine
        still sleeps, or is STALE or DEAD.
        """
        for name in names:
            if not self._fleet.engines[name].record.version:
                raise StateError(
                    f"engine {name} sleeps without weights: update_weights() or heal() brings them"
                )
        await self.engine_group.wake(names)

    async def experts(self, name: str) -> Experts:
        """Return the expert in each slot of an engine, by layer. Empty if its experts stay."""
        calls = {f"engine {name}": self._fleet.engines[name].peer.experts()}
        return next(iter((await gather_named(calls, "layout", self._config.timeout_s)).require().values()))

    async def move_experts(self, experts: Mapping[str, Experts]) -> SyncReport:
        """Have engines move experts, in one commit. Must hold the exclusive lock.

        Raises:
            ConfigError: an engine does not move experts, or its slots cannot hold these.
            StateError: an engine does not serve the committed version, nobody has the digests of the version
                and these tensors, or a holder was lost.
            WeightSyncError: the first engine's failure. The engine serves with its experts in place, or is
                STALE or DEAD.
        """
        connection, clock, expected = self.connection(), PhaseClock(), self.snapshot_index.expected
        if not self.connected:
            raise StateError("the next update connects the fleet again: move experts after it")
        for name, wanted in experts.items():
            check_experts(name, wanted, await self.experts(name))
            record = self._fleet.engines[name].record
            if (record.state, record.version) != (EngineState.SERVING, self.version) or not self.version:
                raise StateError(
                    f"engine {name} does not serve version {self.version}: update or heal it first"
                )
        if expected is None:
            why = "another driver committed it, or the trainers' tensors changed"
            raise StateError(f"digests of version {self.version} are not kept, since {why}: update first")
        await self.snapshot_index.writable([*experts])  # holders may still copy from the engines' memory
        group = self.engine_group
        moved = MovedExperts(self._config, self._fleet, group, connection)
        async with self._open():
            verified = await moved.move(experts, self.version, self._comparison, expected, clock)
            with clock.phase("commit"):
                await group.resume(verified, self.version)
        if verified and connection.in_place:  # copies of the engines' memory have experts in other places
            self.snapshot_index.begin(self.version, connection, expected)
        if failures := [group.failures[name] for name in experts if name in group.failures]:
            raise failures[0]
        return self._report(clock)

    def can_refill(self, engine: str) -> bool:
        """Return True if snapshots or equal engines can fill `engine` with the committed version."""
        now = self._connection
        return now is not None and self.snapshot_index.choice(self.version, now, engine).suffices

    async def adopt(self, name: str) -> None:
        """Connect an engine that was added or restarted after ``connect``.

        Raises PlanError if the plan has no engine of this layout: then the whole fleet has to ``connect``
        again. Also raises the other errors of ``connect``.
        """
        await self._refiller.adopt(name)

    async def refill(self, name: str) -> SyncReport:
        """Bring one engine to the committed version without trainers, from snapshots or engines that serve.

        Raises StateError if neither has it, else the cause of the failure: the engine is STALE or
        DEAD.
        """
        clock = PhaseClock()
        await self.snapshot_index.settled()
        refilled = await self._refiller.refill(name, clock)
        return self._report(clock, refilled=refilled)

    def _disconnect(self, _: HolderSilent) -> None:
        self.connected = False

    def connection(self) -> Connection:
        """Return the current connection. Raises StateError before ``connect``."""
        if self._connection is None:
            raise StateError("call connect() first")
        return self._connection

    def _report(
        self, clock: PhaseClock, update: Update | None = None, refilled: Refilled | None = None
    ) -> SyncReport:
        connection, made = self.connection(), update.publication if update else None
        read = update.staged.copied if update and update.staged else refilled
        samples = made.samples if made else ()
        fingerprint = made.fingerprint if made else self.snapshot_index.expected
        assert fingerprint is not None
        left_out = self._frozen.nbytes if self._frozen and update and not update.sends_frozen else 0
        records = {name: member.record for name, member in self._fleet.engines.items()}
        return SyncReport(
            version=self.version,
            nbytes=self._nbytes - left_out,
            seconds=clock.total(),
            phases=clock.seconds,
            spans={"driver": tuple(clock.spans)} | (update.spans if update else {}),
            verified=True,  # engines that failed the comparison were excluded above, or the update raised
            engines={name: record.version for name, record in records.items()},
            states={name: record.state.value for name, record in records.items()},
            failures={name: error.told() for name, error in self.engine_group.failures.items()},
            digest=f"{int(fingerprint[0]):016x}",
            num_buckets=update.num_buckets if update else connection.plan.num_buckets,
            epoch=connection.plan.epoch,
            connect_phases=connection.seconds,
            routes=connection.router.routes,
            proofs={name: how for name, how in self._comparison.proofs.items() if name in records},
            nonfinite=made.nonfinite if made else {},
            density=densities(samples) if samples else {},
            bytes_from=read.bytes_from if read else {},
            ways=read.ways if read else {},
        )
