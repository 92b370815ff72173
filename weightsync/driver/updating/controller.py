"""Lifecycle of an update: publish, pause, move, verify, commit.

Where trainers are read in place, engines pause meanwhile, and trainers' digests are taken while bytes move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection, connect
from weightsync.driver.connecting.traffic import links
from weightsync.driver.engine_group import EngineGroup, Rewritten
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineFailed, Events, HolderSilent
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named, remoteness
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.driver.snapshots.stager import StagedVersion, Stager, settled
from weightsync.driver.update_lock import UpdateLock
from weightsync.driver.updating.attempt import Attempt
from weightsync.driver.updating.gpu_peaks import peaks, sampled
from weightsync.driver.updating.joint_commit import JointMember
from weightsync.driver.updating.moves import Moves
from weightsync.driver.updating.refill import Refiller
from weightsync.driver.updating.takeover import require_newer, take_over
from weightsync.driver.verifying.comparison import Comparison
from weightsync.driver.verifying.frozen import FrozenTensors
from weightsync.driver.verifying.rewritten_sources import rewritten
from weightsync.driver.verifying.trainers import Publication, Publishing, Trainers
from weightsync.errors import MovedError, StateError, VerifyError, WeightSyncError
from weightsync.plan import Plan
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.messages import LoadReport, Refilled
from weightsync.protocol.timing import PhaseClock, Span
from weightsync.report import Link, SyncReport

logger = logging.getLogger("weightsync.driver.updating.controller")


class Controller:
    """Takes a fleet through one version after another.

    One update or `connect` runs at a time. Between updates, engines are refilled and added in parallel, one
    task for each engine. These tasks stop when an update starts.

    Attributes:
        version: the newest committed version, 0 before the first.
        connected: whether an update may run; False before ``connect`` and after a holder is lost or new.
        engine_group: the engines, and which of them failed.
        snapshot_index: the holders' snapshots of the committed version.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self.version = 0
        self.connected = False
        self.events = Events()
        self.events.subscribe(HolderSilent, lambda _: self._disconnect())
        self._update_lock = UpdateLock(min(GRACE_S, config.timeout_s))
        self.engine_group = EngineGroup(config, fleet, self.events, self._update_lock)
        self.snapshot_index = SnapshotIndex(config, fleet, self.events, self.engine_group)
        self._trainers = Trainers(config, fleet)
        self._comparison = Comparison(config, fleet, self._trainers, self.snapshot_index.live)
        self._refiller = Refiller(
            config,
            fleet,
            self.events,
            self.engine_group,
            self.snapshot_index,
            self._update_lock,
            self._comparison,
        )
        self._epoch = self._num_buckets = self._nbytes = self._frozen_nbytes = 0
        self._publishing: Publishing | None = None
        self._publication: Publication | None = None
        self._spans: dict[str, Sequence[Span]] = {}
        self._frozen = FrozenTensors(self._comparison)
        self._stager: Stager | None = None
        self._staged: StagedVersion | None = None
        self._connection: Connection | None = None
        self._sends_frozen, self._joint = True, JointMember.alone()

    @property
    def plan(self) -> Plan | None:
        """The plan of the current membership epoch, None before ``connect``."""
        return self._connection.plan if self._connection else None

    def links(self) -> list[Link]:
        """List which bytes each engine rank gets from where. Raises StateError before ``connect``."""
        return links(self.connection(), self._fleet)

    async def connect(self) -> None:
        """Plan and connect the current fleet. Raises the errors of `driver.connect.connect`."""
        self.connected = False
        await self.snapshot_index.ended()  # or holders would still allocate for the last connect
        self._frozen.committed = None
        self._epoch += 1
        demoted = self._connection.router.demoted if self._connection else {}
        config = settled(self._config, self._fleet)
        self._stager = Stager(config, self._fleet, self.events) if config.stage != "none" else None
        self._connection = made = await connect(self._fleet, config, self._epoch, demoted)
        self._trainers.agreement.begin(made.plan)
        self._nbytes = made.plan.total_nbytes  # 7 ms for 20,000 tensors
        self._frozen_nbytes = sum(made.plan.tensors[i].nbytes for i in made.plan.frozen)
        if self._stager:
            await self._stager.reserve()  # the first update needs that memory
        else:
            self.snapshot_index.reserve(made)
        self.connected = True
        serves = f" · v{self.version}" if self.version else ""  # an earlier driver's is not known yet
        logger.info("[driver%s] connected: buckets %d, %s", serves, made.plan.num_buckets, made.seconds)

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
        async with self._update_lock.exclusive() as late:
            for name in late:  # the engine's ranks are still busy with work that did not stop
                self._fleet.engines[name].attached = False
                await self.engine_group.drop(self._fleet.engines[name])
                self.engine_group.left_behind(name)
            yield

    async def idle(self) -> None:
        """Wait until the exclusive lock is free."""
        await self._update_lock.idle()

    def shared(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the shared lock for engine `name`. No update and no other task works on it."""
        return self._update_lock.shared(name)

    async def update(
        self,
        version: int,
        when_held: Callable[[], None] = lambda: None,
        joint: JointMember | None = None,
    ) -> SyncReport:
        """Take `version` from the trainers to every live engine that is attached.

        `when_held` is called once trainers may change their weights: the holders have every byte or, where
        trainers are read in place, the engines do. `joint` waits for other models, see `JointCommit`. If
        trainers' weights moved to other addresses, the controller connects again and repeats the update.

        Raises:
            StateError: not connected, or fewer than ``min_engines`` engines are alive.
            ConfigError: `version` is not greater than the last that committed, or that engines served before.
            WeightSyncError: a failure, if fewer than ``min_engines`` took the version. After a failed publish
                or pause, engines keep their weights, unless bytes moved already; sleeping ones may have been
                woken. After a failed move or comparison they are STALE.
        """
        if not self.connected or self._connection is None:
            raise StateError("call connect() before update_weights()")
        require_newer(version, self.version, self._fleet)
        if not await self._refiller.late_reads.finish(self._connection):
            await self.connect()
        takers = {name: member for name, member in self._fleet.live().items() if member.attached}
        least = self._config.min_engines
        if len(takers) < least:
            alive = "1 engine is alive" if len(takers) == 1 else f"{len(takers)} engines are alive"
            raise StateError(f"{alive}, sync.min_engines is {least}")
        asleep = [member for member in takers.values() if member.record.state is EngineState.ASLEEP]
        clock, self._joint = PhaseClock(), joint or JointMember.alone()
        watching = {holder for member in asleep for holder in member.holders}
        with collector_paused:  # a collection takes long, and engines are paused
            async with sampled(self._fleet, watching, clock.now) as seen:
                try:
                    report = await self._update(version, takers, clock, when_held)
                except MovedError as error:
                    logger.info("[driver · v%d] connecting again: %s", version, error)
                    await self.connect()
                    report = await self._update(version, takers, clock, when_held)
        return replace(report, peak_memory=peaks(seen, clock.spans)) if asleep else report

    async def _update(
        self,
        version: int,
        takers: Mapping[str, EngineMember],
        clock: PhaseClock,
        when_held: Callable[[], None],
    ) -> SyncReport:
        assert self._connection is not None
        self.engine_group.failures = {}
        have_frozen = self._frozen.are_held(self._connection, takers, self.version)
        self._sends_frozen = bool(self._stager) or not have_frozen
        self._spans, self._publishing, self._publication, self._staged = {}, None, None, None
        self.engine_group.begin(takers, version)
        if self._connection.in_place:
            await self._joint.before_pause()
            try:
                with clock.phase("publish"):
                    await self.snapshot_index.writable()
                    paused = await self._ready_and_pause(takers, version)
                return await self._deliver(version, takers, paused, clock, when_held)
            finally:
                if self._publishing:
                    self._publishing.close()
        with clock.phase("publish"):
            await self.snapshot_index.writable()
            await self._publish(version)
        when_held()
        if self._stager:
            with clock.phase("stage"):
                assert self._publication is not None
                self._staged = await self._stager.stage(version, self._connection, self._publication, takers)
        await self._joint.before_pause()
        with clock.phase("pause"):
            paused = await self.engine_group.pause_together(takers)
        return await self._deliver(version, takers, paused, clock)

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

    def can_refill(self, engine: str) -> bool:
        """Return True if snapshots or equal engines can fill `engine` with the committed version."""
        now = self._connection
        return now is not None and self.snapshot_index.can_fill(self.version, now, engine)

    async def adopt(self, name: str) -> None:
        """Connect an engine that was added or restarted after ``connect``.

        Raises PlanError if the plan has no engine of this layout: then the whole fleet has to ``connect``
        again. Also raises the other errors of ``connect``.
        """
        await self._refiller.adopt(self.connection, lambda: self.version, name)

    async def refill(self, name: str) -> SyncReport:
        """Bring one engine to the committed version without trainers, from snapshots or engines that serve.

        Raises StateError if neither has it, else the cause of the failure: the engine is STALE or
        DEAD.
        """
        clock = PhaseClock()
        await self.snapshot_index.settled()
        refilled = await self._refiller.refill(self.connection, lambda: self.version, name, clock)
        return self._report(clock, refilled)

    def _disconnect(self) -> None:
        self.connected = False

    def connection(self) -> Connection:
        """Return the current connection. Raises StateError before ``connect``."""
        if self._connection is None:
            raise StateError("call connect() first")
        return self._connection

    async def _publish(self, version: int) -> None:
        publication = await (self._publishing or self._trainers.begin(version)).publication()
        await self._frozen.check(self.connection(), self.version, publication.frozen)
        self._publication = publication

    async def _ready(self, version: int) -> None:
        """Have weights ready to be read in place, and published if publishing must come first.

        The likely reasons to refuse a version must be known before a byte moves: NaN, frozen tensors,
        replicas.
        """
        is_early = self.connection().plan.frozen or self._trainers.agreement.compares_all
        if self._config.nonfinite != "refuse" and not is_early:
            self._publishing = self._trainers.begin(version)
            await self._publishing.readable()
        else:
            await self._publish(version)

    async def _ready_and_pause(self, takers: Mapping[str, EngineMember], version: int) -> Sequence[str]:
        """Ask trainers and pause engines in parallel: neither takes long."""
        ready, paused = await asyncio.gather(
            self._ready(version), self.engine_group.pause_together(takers), return_exceptions=True
        )
        if isinstance(paused, BaseException):
            raise paused
        if isinstance(ready, BaseException):
            await self.engine_group.go_on(paused)
            raise ready
        return paused

    async def _deliver(
        self,
        version: int,
        takers: Mapping[str, EngineMember],
        paused: Sequence[str],
        clock: PhaseClock,
        when_held: Callable[[], None] = lambda: None,
    ) -> SyncReport:
        assert self._connection is not None
        least = self._config.min_engines
        if len(paused) < least:
            await self.engine_group.go_on(paused)
            raise self.engine_group.first_failure()
        with clock.phase("move"):
            was_published = self._publication is not None
            loaded = await self._move_and_publish([name for name in takers if name in paused], version)
        assert self._publication is not None
        plan, expected = self.connection().plan, self._publication.fingerprint
        with clock.phase("verify"):
            wrong = await self._comparison.wrong(plan, loaded, expected)
            if not was_published and any(wrong.values()):
                wrong = await self._move_again(version, wrong)
            # While trainers that are read in place still wait: writes after that are no fault.
            changed = await self._changed(wrong)
            verified = self.engine_group.judge(version, wrong, changed)
            self.engine_group.kept_up(verified)
        when_held()
        for name, error in self.engine_group.failures.items():
            if isinstance(error, VerifyError):
                self._connection.router.demote(name, error)
        self.connected = self.connected and self._connection.router.suffices
        if len(self.engine_group.whole(verified)) < least:
            self.engine_group.enter(verified, EngineState.STALE)
            raise self.engine_group.first_failure()
        with clock.phase("commit"):
            await self._meet_others(verified)
            num_serving = await self.engine_group.resume(verified, version)
        if num_serving:
            self.version = version
            self._frozen.committed = self._publication.frozen if plan.frozen else None
            if self._staged:
                self.snapshot_index.begin_staged(self._staged)
            else:
                self.snapshot_index.begin(version, self._connection, expected)
        if num_serving < least:
            raise self.engine_group.first_failure()
        return self._report(clock)

    async def _meet_others(self, verified: Sequence[str]) -> None:
        try:
            await self._joint.before_commit()
        except WeightSyncError as error:
            self._give_up(verified, str(error))
            raise

    async def _move_and_publish(self, takers: Sequence[str], version: int) -> Mapping[str, LoadReport]:
        """Move a version; publish it meanwhile if it is not published. Returns the engines' answers."""
        if self._staged:
            self._num_buckets = 0
            return self._timed(await self._refiller.read_staged(takers, self._staged))
        if self._publication is not None:
            return await self._move(takers)
        loaded, published = await asyncio.gather(
            self._move(takers), self._publish(version), return_exceptions=True
        )
        if isinstance(loaded, BaseException):
            raise loaded
        if isinstance(published, BaseException):
            self._give_up(loaded, f"the received bytes cannot be verified: {published}")
            raise published
        return loaded

    async def _move_again(self, version: int, wrong: dict[str, list[str]]) -> dict[str, list[str]]:
        """Publish, then move to engines with `wrong` tensors. Returns the tensors that are still wrong.

        Digests that were taken while bytes moved do not tell a wrong copy from a trainer's write.
        """
        names = [name for name, tensors in wrong.items() if tensors]
        logger.warning(
            "[driver · v%d] moves again, since bytes differed: engines %s", version, ", ".join(names)
        )
        assert self._publication is not None
        plan, expected = self.connection().plan, self._publication.fingerprint
        try:
            if ((await self._trainers.publish(version)).fingerprint != expected).any():
                return wrong  # a trainer wrote: `_changed` finds the tensors
            again = await self._comparison.wrong(plan, await self._move(names), expected)
            return {name: tensors for name, tensors in wrong.items() if not tensors} | again
        except WeightSyncError:
            self._give_up(wrong, "the update that it took part in broke")
            raise

    def _give_up(self, names: Iterable[str], reason: str) -> None:
        """Mark engines STALE that took bytes which cannot be verified."""
        self.engine_group.enter(names, EngineState.STALE)
        for name in names:
            self.events.publish(EngineFailed(name, StateError(reason)))

    async def _move(self, takers: Sequence[str]) -> Mapping[str, LoadReport]:
        """Run one attempt: holders move bytes, engines load. Returns each engine's answers by rank."""
        attempt, timeout_s = self.engine_group.next_attempt(), self._config.timeout_s
        self.engine_group.enter(takers, EngineState.WRITING)
        members = {name: self._fleet.engines[name] for name in takers}
        fed = {holder for member in members.values() for holder in member.holders}
        assert self._connection is not None
        holders = {name: member.holders for name, member in members.items()}
        tasks = self._connection.router.tasks(holders, self._sends_frozen)
        plan, any_task = self._connection.plan, next(iter(tasks.values()))
        num_buckets = plan.num_buckets if self._sends_frozen else plan.num_changing_buckets
        self._num_buckets = (
            num_buckets if any_task.broadcasts_all else sum(b < num_buckets for b in any_task.cast)
        )
        moves = Moves(self._fleet, attempt, {i: (i in fed, task) for i, task in tasks.items()}, timeout_s)
        loads = {name: self.engine_group.load(member, attempt) for name, member in members.items()}
        feeds = {name: [f"holder {i}" for i in member.holders] for name, member in members.items()}
        moving = Attempt(moves.calls, loads, feeds, timeout_s)
        aborting = asyncio.create_task(self._abort_if_lost(moving))
        try:
            moved, outcome = await moving.run()
            await aborting
        finally:
            aborting.cancel()
            moves.close()
        loaded = outcome.answers
        self.engine_group.blame("move", outcome.failures)
        if moved.failures:
            # After a failed move no engine is known to hold a whole version.
            self.connected = False
            self._give_up(loaded, "the move that it took part in broke")
            raise min(moved.failures.values(), key=remoteness)
        self._spans |= {name: [each.span] for name, each in moved.answers.items()}
        self._connection.router.note(loaded)
        return self._timed(loaded)

    def _timed(self, loaded: Mapping[str, LoadReport]) -> Mapping[str, LoadReport]:
        for name, report in loaded.items():
            self._spans |= {f"engine {name} rank {i}": spans for i, spans in enumerate(report.spans)}
        return loaded

    async def _changed(self, wrong: Mapping[str, Sequence[str]]) -> Rewritten:
        """Find tensors that trainers rewrote during the update, if that may explain `wrong`."""
        assert self._connection is not None
        faulty = [name for name, tensors in wrong.items() if tensors]
        # If several engines were sent the same bytes and only one differs, the fault is the engine's.
        reads = any(map(self._connection.router.reads_directly, faulty))
        if not faulty or (len(faulty) == 1 < len(wrong) and not reads):
            return {}
        assert self._publication is not None
        suspects = frozenset(tensor for tensors in wrong.values() for tensor in tensors)
        published = {name: each.fingerprint for name, each in self._publication.answers.items()}
        return await rewritten(
            self._fleet,
            self._connection,
            published,
            self._comparison.tables,
            suspects,
            self._config.timeout_s,
        )

    async def _abort_if_lost(self, attempt: Attempt[LoadReport]) -> None:
        """Stop all holders' broadcasts if one is lost: others may wait for it."""
        if lost := await attempt.lost_holder():
            calls = {name: each.abort(str(lost)) for name, each in self._fleet.named_holders().items()}
            await gather_named(calls, "abort", self._config.timeout_s)

    def _report(self, clock: PhaseClock, refilled: Refilled | None = None) -> SyncReport:
        connection = self.connection()
        made = None if refilled else self._publication
        read = refilled or (self._staged.copied if self._staged else None)
        fingerprint = made.fingerprint if made else self.snapshot_index.expected
        assert fingerprint is not None
        records = {name: member.record for name, member in self._fleet.engines.items()}
        return SyncReport(
            version=self.version,
            nbytes=self._nbytes - (0 if refilled or self._sends_frozen else self._frozen_nbytes),
            seconds=clock.total(),
            phases=clock.seconds,
            spans={"driver": tuple(clock.spans)} | ({**made.spans, **self._spans} if made else {}),
            verified=True,  # engines that failed the comparison were excluded above, or the update raised
            engines={name: record.version for name, record in records.items()},
            states={name: record.state.value for name, record in records.items()},
            failures={name: error.told() for name, error in self.engine_group.failures.items()},
            digest=f"{int(fingerprint[0]):016x}",
            num_buckets=connection.plan.num_buckets if refilled else self._num_buckets,
            epoch=connection.plan.epoch,
            connect_phases=connection.seconds,
            routes=dict(connection.router.routes),
            proofs={name: how for name, how in self._comparison.proofs.items() if name in records},
            nonfinite=made.nonfinite if made else {},
            bytes_from=read.bytes_from if read else {},
            ways=read.ways if read else {},
        )
