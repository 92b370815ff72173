"""One update: publish, pause, move, verify, commit.

If trainers are read in place, engines pause while trainers finish writing. Trainers take digests while
engines pause and bytes move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_group import EngineGroup, Rewritten
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineFailed, Events
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import gather_named, remoteness
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.driver.snapshots.stager import StagedVersion, Stager
from weightsync.driver.updating.attempt import Attempt
from weightsync.driver.updating.joint_commit import JointMember
from weightsync.driver.updating.moved_experts import MovedExperts
from weightsync.driver.updating.refill import Refiller
from weightsync.driver.verifying.comparison import Comparison
from weightsync.driver.verifying.frozen import FrozenTensors
from weightsync.driver.verifying.trainers import Publication, Publishing, Trainers, rewritten
from weightsync.errors import StateError, VerifyError, WeightSyncError
from weightsync.protocol.messages import Fingerprint, LoadReport
from weightsync.protocol.timing import PhaseClock, Span

logger = logging.getLogger("weightsync.driver")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a driver that updates use.

    Attributes:
        stager: stages versions before engines pause; None if versions are not staged.
        frozen: the frozen tensors of the connection; None if there are none.
    """

    config: SyncConfig
    fleet: Fleet
    events: Events
    engine_group: EngineGroup
    snapshot_index: SnapshotIndex
    trainers: Trainers
    comparison: Comparison
    refiller: Refiller
    connection: Connection
    stager: Stager | None
    frozen: FrozenTensors | None


class Update:
    """Takes one version from the trainers to engines. Lives as long as the update.

    Attributes:
        publication: the version, as the trainers published it.
        spans: time spans per trainer rank, holder and engine rank.
        staged: the version in memory of the engines' hosts, if it was staged.
        num_buckets: the number of buckets that were broadcast.
        sends_frozen: whether frozen tensors move, too. If not, the engines have them.
        has_committed: whether an engine serves the version.
        breaks_connection: whether the fleet has to connect again before the next update.
    """

    def __init__(
        self,
        parts: Parts,
        version: int,
        committed: int,
        takers: Mapping[str, EngineMember],
        clock: PhaseClock,
        when_held: Callable[[], None],
        joint: JointMember | None,
    ) -> None:
        """See `Controller.update`.

        `committed`: the last version that committed. `takers`: the engines that take part, by name.
        """
        self._parts, self._config, self._fleet = parts, parts.config, parts.fleet
        self._connection, self._engines, self._joint = parts.connection, parts.engine_group, joint
        self._version, self._committed, self._takers = version, committed, takers
        self._clock, self._when_held = clock, when_held
        self._publishing: Publishing | None = None
        self._paused: Sequence[str] = ()
        self.publication: Publication | None = None
        self.spans: dict[str, Sequence[Span]] = {}
        self.staged: StagedVersion | None = None
        self.num_buckets = 0
        self.sends_frozen = True
        self.has_committed = self.breaks_connection = False

    async def run(self) -> None:
        """Take the version to the engines. Raises as `Controller.update`."""
        self._engines.failures = {}
        if self._parts.frozen and not self._parts.stager:
            held = self._parts.frozen.are_held(self._connection, self._takers, self._committed)
            self.sends_frozen = not held
        self._engines.begin(self._takers, self._version)
        if self._connection.in_place:
            await self._run_in_place()
        else:
            await self._run_published()

    async def _run_in_place(self) -> None:
        if self._joint:
            await self._joint.before_pause()
        try:
            with self._clock.phase("publish"):
                await self._parts.snapshot_index.writable()
                paused = await self._ready_and_pause()
            verified = await self._move_and_verify(paused)
            self._when_held()
            await self._commit(verified)
        finally:
            if self._publishing:
                self._publishing.close()

    async def _run_published(self) -> None:
        with self._clock.phase("publish"):
            await self._parts.snapshot_index.writable()
            publication = await self._publish()
        self._when_held()
        if self._parts.stager:
            with self._clock.phase("stage"):
                stage = self._parts.stager.stage(self._version, self._connection, publication, self._takers)
                self.staged = await stage
            self.spans |= self.staged.spans
        if self._joint:
            await self._joint.before_pause()
        with self._clock.phase("pause"):
            paused = await self._engines.pause_together(self._takers)
        await self._commit(await self._move_and_verify(paused))

    async def _publish(self) -> Publication:
        publication = await (self._publishing or self._parts.trainers.begin(self._version)).publication()
        self._engines.require_unserved(self._version, publication.fingerprint)
        if self._parts.frozen:
            await self._parts.frozen.check(self._connection, self._committed, publication.frozen)
        self.publication = publication
        self.spans |= publication.spans
        return publication

    async def _ready(self) -> None:
        """Have weights ready to be read in place, and published if publishing must come first.

        The likely reasons to refuse a version must be known before a byte moves: NaN, frozen tensors,
        replicas.
        """
        trainers = self._parts.trainers
        if self._config.nonfinite != "refuse" and not self._parts.frozen and not trainers.compares_all:
            self._publishing = trainers.begin(self._version)
            await self._publishing.readable()
        else:
            await self._publish()

    async def _ready_and_pause(self) -> Sequence[str]:
        """Ask trainers and pause engines in parallel: neither takes long."""
        ready, paused = await asyncio.gather(
            self._ready(), self._engines.pause_together(self._takers), return_exceptions=True
        )
        if isinstance(paused, BaseException):
            raise paused
        if isinstance(ready, BaseException):
            await self._engines.go_on(paused)
            raise ready
        return paused

    async def _move_and_verify(self, paused: Sequence[str]) -> Sequence[str]:
        """Move the version to paused engines. Returns the engines that have it."""
        if self._connection.moving:
            moved = MovedExperts(self._config, self._fleet, self._engines, self._connection)
            with self._clock.phase("layout"):
                paused = await moved.follow(paused)
        if len(paused) < self._config.min_engines:
            await self._engines.go_on(paused)
            raise self._engines.first_failure()
        self._paused = paused  # if the update fails from now on, a pause that failed is not the cause
        with self._clock.phase("move"):
            was_published = self.publication is not None
            loaded = await self._move_and_publish([name for name in self._takers if name in paused])
        with self._clock.phase("verify"):
            wrong = await self._parts.comparison.wrong(self._connection.plan, loaded, self._expected)
            if not was_published and any(wrong.values()):
                wrong = await self._move_again(wrong)
            # While trainers that are read in place still wait: writes after that are no fault.
            changed = await self._changed(wrong)
            verified = self._engines.judge(self._version, wrong, changed)
            self._engines.kept_up(verified)
        return verified

    async def _commit(self, verified: Sequence[str]) -> None:
        router, least = self._connection.router, self._config.min_engines
        for name, error in self._engines.failures.items():
            if isinstance(error, VerifyError):
                router.demote(name, error)
        self.breaks_connection |= not router.suffices
        if len(self._fleet.whole(verified)) < least:
            error = self._engines.first_failure(self._paused)
            self._give_up(verified, f"too few engines have version {self._version}: {error}")
            raise error
        with self._clock.phase("commit"):
            if self._joint:
                try:
                    await self._joint.before_commit()
                except WeightSyncError as error:
                    self._give_up(verified, str(error))
                    raise
            self._engines.told = self._version, self._expected
            num_serving = await self._engines.resume(verified, self._version)
        if num_serving:
            self._note_commit()
        if num_serving < least:
            raise self._engines.first_failure(self._paused)

    def _note_commit(self) -> None:
        self.has_committed = True
        if self._parts.frozen:
            self._parts.frozen.committed = self._published.frozen
        if self.staged:
            self._parts.snapshot_index.begin_staged(self.staged)
        else:
            self._parts.snapshot_index.begin(self._version, self._connection, self._expected)

    @property
    def _published(self) -> Publication:
        assert self.publication is not None
        return self.publication

    @property
    def _expected(self) -> Fingerprint:
        return self._published.fingerprint

    async def _move_and_publish(self, takers: Sequence[str]) -> Mapping[str, LoadReport]:
        """Move the version; publish it meanwhile if it is not published. Returns the engines' answers."""
        if self.staged:
            return self._timed(await self._parts.refiller.read_staged(takers, self.staged))
        if self.publication is not None:
            return await self._move(takers)
        loaded, published = await asyncio.gather(self._move(takers), self._publish(), return_exceptions=True)
        if isinstance(loaded, BaseException):
            raise loaded
        if isinstance(published, BaseException):
            self._give_up(loaded, f"the received bytes cannot be verified: {published}")
            raise published
        return loaded

    async def _move_again(self, wrong: dict[str, list[str]]) -> dict[str, list[str]]:
        """Publish, then move to engines with `wrong` tensors. Returns the tensors that are still wrong.

        Digests that were taken while bytes moved do not tell a wrong copy from a trainer's write.
        """
        names = [name for name, tensors in wrong.items() if tensors]
        about = "[driver · v%d] moves again, since bytes differed: engines %s"
        logger.warning(about, self._version, ", ".join(names))
        try:
            again = await self._parts.trainers.publish(self._version)
            if (again.fingerprint != self._expected).any():
                return wrong  # a trainer wrote: `_changed` finds the tensors
            loaded = await self._move(names)
            found = await self._parts.comparison.wrong(self._connection.plan, loaded, self._expected)
            return {name: tensors for name, tensors in wrong.items() if not tensors} | found
        except WeightSyncError:
            self._give_up(wrong, "the update that it took part in broke")
            raise

    def _give_up(self, names: Iterable[str], reason: str) -> None:
        """Mark engines STALE that took bytes which do not become a version."""
        self._engines.enter(names, EngineState.STALE)
        for name in names:
            self._parts.events.publish(EngineFailed(name, StateError(reason)))

    async def _move(self, takers: Sequence[str]) -> Mapping[str, LoadReport]:
        """Run one attempt: holders move bytes, engines load. Returns each engine's answers by rank."""
        attempt, timeout_s = self._engines.next_attempt(), self._config.timeout_s
        self._engines.enter(takers, EngineState.WRITING)
        members = {name: self._fleet.engines[name] for name in takers}
        holders = {name: member.holders for name, member in members.items()}
        tasks = self._connection.router.tasks(holders, self.sends_frozen)
        self.num_buckets = len(next(iter(tasks.values())).buckets(self._connection.plan))
        moves = {
            f"holder {i}": self._fleet.holders[i].move(attempt, task, timeout_s) for i, task in tasks.items()
        }
        loads = {name: self._engines.load(member, attempt) for name, member in members.items()}
        feeds = {name: [f"holder {i}" for i in member.holders] for name, member in members.items()}
        moving = Attempt(moves, loads, feeds, timeout_s)
        aborting = asyncio.create_task(self._abort_if_lost(moving))
        try:
            moved, outcome = await moving.run()
            await aborting
        finally:
            aborting.cancel()
        loaded = outcome.answers
        self._engines.blame("move", outcome.failures)
        if moved.failures:
            # After a failed move no engine is known to hold a whole version.
            self.breaks_connection = True
            self._give_up(loaded, "the move that it took part in broke")
            raise min(moved.failures.values(), key=remoteness)
        self.spans |= {name: [each.span] for name, each in moved.answers.items()}
        self._connection.router.note(loaded)
        return self._timed(loaded)

    def _timed(self, loaded: Mapping[str, LoadReport]) -> Mapping[str, LoadReport]:
        for name, report in loaded.items():
            self.spans |= {f"engine {name} rank {i}": spans for i, spans in enumerate(report.spans)}
        return loaded

    async def _changed(self, wrong: Mapping[str, Sequence[str]]) -> Rewritten:
        """Find tensors that trainers rewrote during the update, if that may explain `wrong`."""
        faulty = [name for name, tensors in wrong.items() if tensors]
        # If several engines were sent the same bytes and only one differs, the fault is the engine's.
        reads = any(map(self._connection.router.reads_directly, faulty))
        if not faulty or (len(faulty) == 1 < len(wrong) and not reads):
            return {}
        suspects = frozenset(tensor for tensors in wrong.values() for tensor in tensors)
        published = {name: each.fingerprint for name, each in self._published.answers.items()}
        tables, timeout_s = self._parts.comparison.tables, self._config.timeout_s
        return await rewritten(self._fleet, self._connection, published, tables, suspects, timeout_s)

    async def _abort_if_lost(self, attempt: Attempt) -> None:
        """Stop all holders' broadcasts if one is lost: others may wait for it."""
        if lost := await attempt.lost_holder():
            calls = {name: each.abort(str(lost)) for name, each in self._fleet.named_holders().items()}
            await gather_named(calls, "abort", self._config.timeout_s)
