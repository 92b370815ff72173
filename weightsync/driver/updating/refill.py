"""Brings one engine back while others serve: adopts the engine, then refills it from copies or engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection, FlatLayout, adopt
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import Events, HolderSilent
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named, remoteness
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.driver.snapshots.source_choice import SourceChoice
from weightsync.driver.snapshots.stager import StagedVersion
from weightsync.driver.update_lock import UpdateLock
from weightsync.driver.updating.late_reads import LateReads
from weightsync.driver.updating.moved_experts import MovedExperts
from weightsync.driver.verifying.comparison import Comparison
from weightsync.errors import ConfigError, DeadlineError, ReadError, StateError, WeightSyncError
from weightsync.protocol.messages import LoadReport, Refilled, Snapshot
from weightsync.protocol.peers import EnginePeer
from weightsync.protocol.timing import PhaseClock, within


class GaveWayError(StateError):
    """An update interrupted the work. The engine takes part in it if it is attached."""


class _DamagedCopyError(ReadError):
    """A copy was damaged, and is no source any more. The engine that read it is not at fault."""


class Refiller:
    """Adopts and refills single engines, under the shared update lock.

    Attributes:
        late_reads: adopted engines' direct reads in updates, planned after the engines' refill.
    """

    def __init__(
        self,
        config: SyncConfig,
        fleet: Fleet,
        events: Events,
        engine_group: EngineGroup,
        snapshot_index: SnapshotIndex,
        update_lock: UpdateLock,
        comparison: Comparison,
        connected: Callable[[], Connection],
        committed: Callable[[], int],
    ) -> None:
        """`connected` and `committed` return the connection and the version of the last update.

        They are called once no update runs, since an update may connect again.
        """
        self._config, self._fleet, self._events = config, fleet, events
        self._engine_group, self._snapshot_index = engine_group, snapshot_index
        self._update_lock, self._comparison = update_lock, comparison
        self._connected, self._committed = connected, committed
        self.late_reads = LateReads(fleet, events, engine_group, update_lock, connected)
        self._first_of_host: dict[tuple[str, FlatLayout], asyncio.Event] = {}

    async def adopt(self, name: str) -> None:
        """Connect an engine that was added or restarted, or whose experts moved.

        Raises the errors of `connecting.connect.adopt`. If the engine would be refused again, such as for its
        draft, it is DEAD: the other engines connect without it.
        """
        async with self._sharing(name, lambda: self._engine_group.drop(self._fleet.engines[name])):
            moved = MovedExperts(self._config, self._fleet, self._engine_group, self._connected())
            if not self._fleet.engines[name].attached or await moved.among([name]):
                try:
                    await adopt(self._fleet, self._connected(), name, self._config)
                except ConfigError:
                    self._engine_group.enter([name], EngineState.DEAD)
                    raise
        is_asleep = self._fleet.engines[name].record.state is EngineState.ASLEEP
        if is_asleep or not self._choice(name).suffices:
            self.late_reads.begin(name)  # no refill follows

    def _choice(self, name: str) -> SourceChoice:
        return self._snapshot_index.choice(self._committed(), self._connected(), name)

    async def refill(self, name: str, clock: PhaseClock) -> Refilled:
        """Fill one engine with the committed version. Returns the sum of the ranks' reads.

        If a copy is damaged, the copy is dropped, and the engine is filled from other sources.

        Raises:
            StateError: no holder has a snapshot of that version and no engine alike serves it, or the engine
                is not attached.
            GaveWayError: an update stopped it, or brought the engine that version.
            WeightSyncError: the cause of a failure; the engine is STALE or DEAD.
        """
        blamed = set[str]()
        try:
            while True:
                try:
                    return await self._refill(name, clock)
                except _DamagedCopyError as error:
                    # A holder whose next copy is damaged, too, may damage all.
                    if error.peer in blamed or not self._choice(name).suffices:
                        raise ReadError(*error.args) from error
                    blamed.add(error.peer)
        finally:
            if self._connected().router.joining(name):
                self.late_reads.begin(name)

    async def _refill(self, name: str, clock: PhaseClock) -> Refilled:
        async with (
            self._turn(self._connected(), name) as waited,
            self._sharing(name, lambda: self._stop(self._fleet.engines[name])),
        ):
            # An update may have run since, and connected again. Waiting here would delay the next update.
            if self._snapshot_index.is_reserving:
                raise GaveWayError(f"engine {name} was not filled: an update connected again")
            await self._snapshot_index.copied()
            connection, version, record = (
                self._connected(),
                self._committed(),
                self._fleet.engines[name].record,
            )
            if waited and (record.state, record.version) == (EngineState.SERVING, version):
                raise GaveWayError(f"engine {name} got version {version} from an update while it waited")
            await self._snapshot_index.bring_near(version, connection, name)
            if self._update_lock.is_wanted:
                raise GaveWayError(f"engine {name} was not filled: an update brings a newer version")
            async with self._snapshot_index.sources(version, connection, name) as snapshot:
                if snapshot is None or not self._fleet.engines[name].attached:
                    raise StateError(
                        "no holder keeps the committed version, and no engine alike serves it: "
                        "call update_weights() with the next"
                    )
                try:
                    refilled = await self._fill(name, connection, version, snapshot, clock)
                except ReadError as error:
                    if await self._snapshot_index.drop_headless([error.peer]):
                        raise _DamagedCopyError(*error.args) from error
                    raise
                if refilled.left:
                    await self._snapshot_index.drop_headless(refilled.left)
                return refilled

    @asynccontextmanager
    async def _turn(self, connection: Connection, name: str) -> AsyncIterator[bool]:
        """Let one engine of a host read from other hosts, for all equal engines of the host.

        Equal engines wait until the first engine's refill ends, which has deadlines. Yields whether there was
        a wait.
        """
        flat, host = connection.flat_layouts.get(name), self._fleet.node(self._fleet.engines[name].holders[0])
        waited = False
        if flat is None:
            yield waited
            return
        while not (is_near := self._choice(name).is_near):
            if not (first := self._first_of_host.get((host, flat))):
                break
            await first.wait()
            waited = True
        if is_near:
            yield waited
            return
        self._first_of_host[host, flat] = ended = asyncio.Event()
        try:
            yield waited
        finally:
            del self._first_of_host[host, flat]
            ended.set()

    async def _fill(
        self, name: str, connection: Connection, version: int, snapshot: Snapshot, clock: PhaseClock
    ) -> Refilled:
        member = self._fleet.engines[name]
        self._engine_group.begin([name], version)
        with clock.phase("pause"):
            paused = await self._engine_group.pause({name: member})
        if not paused:
            raise self._engine_group.failures[name]
        with clock.phase("move"):
            ranks = [_of_rank(snapshot, rank) for rank in range(len(member.holders))]
            loaded, refilled = await self._read(
                name, ranks, self._config.connect_timeout_s, may_map=self._config.refill == "auto"
            )
        with clock.phase("verify"):
            assert self._snapshot_index.expected is not None
            wrong = await self._comparison.wrong(connection.plan, loaded, self._snapshot_index.expected)
            if wrong.get(name):
                self._engine_group.enter([name], EngineState.STALE)
                if error := await self._of_source(connection, version, name, refilled.bytes_from):
                    raise error
            verified = self._engine_group.judge(version, wrong, {})
        with clock.phase("commit"):
            await self._engine_group.resume(verified, version)
            if failure := self._engine_group.failures.get(name):
                raise failure
        return refilled

    async def _of_source(
        self, connection: Connection, version: int, name: str, read: Collection[str]
    ) -> _DamagedCopyError | None:
        """Return an error if a holder in `read` had wrong bytes, and None if engine `name` is at fault.

        The holder's copy, or engine, is no source any more. Raises if an engine that was read is silent.
        """
        if peer := await self._snapshot_index.drop_damaged(connection, name, read):
            return _DamagedCopyError(peer, f"its copy of version {version} has wrong bytes")
        served = {
            other: peer
            for other in self._fleet.live().keys() - {name}
            for peer in (f"holder {i}" for i in self._fleet.engines[other].holders)
            if peer in read
        }
        moved = MovedExperts(self._config, self._fleet, self._engine_group, connection)
        for other in await moved.among([*served]):
            self._snapshot_index.live_sources.left_out |= {other}
            return _DamagedCopyError(served[other], f"experts of engine {other} moved since the last update")
        return None

    async def read_staged(self, names: Sequence[str], staged: StagedVersion) -> dict[str, LoadReport]:
        """Have paused engines take a version from their hosts' memory, in parallel.

        Returns the answers of engines that took it. Other engines are STALE or DEAD.
        """
        calls = {}
        for name in names:
            holders = self._fleet.engines[name].holders
            ranks = [staged.snapshot(self._fleet.node(holder), holder) for holder in holders]
            calls[name] = self._read(name, ranks, self._config.timeout_s, may_map=True, phase="move")
        done = await asyncio.gather(*calls.values(), return_exceptions=True)
        loaded: dict[str, LoadReport] = {}
        for name, outcome in zip(names, done, strict=True):
            if isinstance(outcome, WeightSyncError):
                if name not in self._engine_group.failures:
                    self._engine_group.blame("move", {name: outcome})
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                loaded |= outcome[0]
        return loaded

    @asynccontextmanager
    async def _sharing(self, name: str, end: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        stopped = False

        async def stop() -> None:
            nonlocal stopped
            stopped = True
            await end()

        try:
            async with self._update_lock.shared(name, stop):
                yield
        except WeightSyncError as error:
            if stopped:
                raise GaveWayError(str(error)) from error
            raise

    async def _stop(self, member: EngineMember) -> None:
        why = "an update brings a newer version"
        calls = {f"holder {i}": self._fleet.holders[i].stop_refill(why) for i in member.holders}
        await gather_named(calls, "stop", GRACE_S)
        await self._snapshot_index.host_copies.stop()  # a holder did not answer, so stop all copies

    async def _read(
        self, name: str, ranks: Sequence[Snapshot], limit_s: float, *, may_map: bool, phase: str = "refill"
    ) -> tuple[dict[str, LoadReport], Refilled]:
        """Have all holders read and all ranks load, in parallel. `ranks` has the reads of each rank."""
        attempt, member = self._engine_group.next_attempt(), self._fleet.engines[name]
        timeout_s = self._config.timeout_s
        self._engine_group.enter([name], EngineState.REFILLING)
        with within(limit_s):
            reads = {
                f"holder {i}": asyncio.ensure_future(
                    self._fleet.holders[i].refill(attempt, snapshot, may_map, timeout_s, limit_s)
                )
                for i, snapshot in zip(member.holders, ranks, strict=True)
            }

        async def load(peer: EnginePeer) -> LoadReport:
            return await _while_read(name, peer.load(attempt, timeout_s), reads.values(), timeout_s)

        try:
            loaded = await self._engine_group.ask(
                {name: member}, phase, load, self._engine_group.drop, limit_s
            )
            # The load has ended, so each holder has ended or been told to: a silent one hangs.
            read = await gather_named(reads, "refill", GRACE_S)
        finally:
            for task in reads.values():
                task.cancel()
        if any(isinstance(error, DeadlineError) for error in read.failures.values()):
            self._events.publish(HolderSilent())
        if read.failures and member.record.state is not EngineState.DEAD:
            # The holder knows the cause; the engine only reports that the holder gave up.
            self._engine_group.enter([name], EngineState.STALE)
            raise min(read.failures.values(), key=remoteness)
        return loaded, Refilled.together([*read.answers.values()])


def _of_rank(snapshot: Snapshot, rank: int) -> Snapshot:
    """Return `snapshot` with only the parts that rank `rank` of an engine needs."""
    if not snapshot.is_flat:
        return snapshot
    part = min(snapshot.parts) + rank
    reserve = {part: snapshot.reserve[part]} if part in snapshot.reserve else {}
    return replace(snapshot, parts={part: snapshot.parts[part]}, reserve=reserve)


async def _while_read(
    name: str,
    load: Coroutine[object, object, LoadReport],
    reads: Iterable[asyncio.Task[Refilled]],
    timeout_s: float,
) -> LoadReport:
    """Await `load`. Raises DeadlineError if it takes over `timeout_s` longer than the last of `reads`."""
    loading = asyncio.ensure_future(load)
    reading = asyncio.ensure_future(asyncio.wait(reads))
    try:
        await asyncio.wait([loading, reading], return_when=asyncio.FIRST_COMPLETED)
        if not (await asyncio.wait([loading], timeout=timeout_s + GRACE_S))[0]:
            raise DeadlineError("refill", (f"engine {name}",), timeout_s)
        return await loading
    finally:
        loading.cancel()
        reading.cancel()
