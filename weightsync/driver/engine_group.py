"""The fleet's engines as the controller asks them: all at once, and who fails is blamed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.connect import Connection
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.events import EngineFailed, Events
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.rewritten_sources import Rewritten
from weightsync.driver.update_lock import UpdateLock
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    RankLostError,
    SlowError,
    SourceChangedError,
    VerifyError,
    WeightSyncError,
    Where,
)
from weightsync.protocol.messages import Digests
from weightsync.protocol.peers import EnginePeer

__all__ = ["EngineGroup", "Halts"]

logger = logging.getLogger("weightsync.driver.controller")

T = TypeVar("T")

_GONE = (PeerLostError, RankLostError)
"""The engine's process, or one of its ranks': it is DEAD."""


class EngineGroup:
    """What happens to engines, whoever writes them.

    Attributes:
        failures: of the update or refill that an engine took part in last.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, events: Events, update_lock: UpdateLock) -> None:
        self._config, self._fleet, self._events, self._update_lock = config, fleet, events, update_lock
        self._attempt = 0
        self.failures: dict[str, WeightSyncError] = {}
        self._version: dict[str, int] = {}
        self._num_slow: Counter[str] = Counter()
        self._halts, self._undoing = Halts(), set[asyncio.Future[None]]()

    def next_attempt(self) -> int:
        """A number that no message of an earlier attempt has."""
        self._attempt += 1
        return self._attempt

    def begin(self, names: Iterable[str], version: int) -> None:
        """These engines are to take `version`."""
        for name in names:
            self.failures.pop(name, None)
            self._version[name] = version

    async def pause(self, takers: Mapping[str, EngineMember]) -> Sequence[str]:
        """Pause all at once; returns the names of those that did. What others do late is undone."""
        mode, timeout_s = self._config.pause, self._config.timeout_s

        async def pause(name: str, member: EngineMember) -> None:
            await self._halts.ask(
                name,
                member.record,
                lambda: member.peer.pause(mode, timeout_s),
                lambda error: self._undo(self._after_late_pause(name, member.record, error)),
            )

        paused = list(await self._gather({n: pause(n, member) for n, member in takers.items()}, "pause"))
        self.enter(paused, EngineState.PAUSED)
        self._doubt(takers)
        return paused

    async def resume(self, names: Iterable[str], version: int) -> int:
        """Let engines serve `version`, which they hold; how many do. Who was lost meanwhile does not."""
        live = self._fleet.live()
        members = {name: live[name] for name in names if name in live}
        serving = await self.ask(members, "commit", lambda peer: peer.resume(version))
        self.enter(serving, EngineState.SERVING, version)
        return len(serving)

    async def sleep(self, names: Iterable[str], level: int) -> None:
        """Have engines pause, and give their memory back, which may take as long again.

        Raises what the first said that did not.
        """
        members = {name: self._fleet.engines[name] for name in names}
        self.begin(members, 0)
        mode, timeout_s = self._config.pause, self._config.timeout_s

        async def sleep(name: str, member: EngineMember) -> None:
            await self._halts.ask(
                name,
                member.record,
                lambda: member.peer.sleep(level, mode, timeout_s),
                lambda error: self._undo(self._after_late_sleep(name, member.record, level, error)),
            )

        calls = {name: sleep(name, member) for name, member in members.items()}
        for name in await self._gather(calls, "sleep", 2 * timeout_s):
            self._fall_asleep(name, members[name].record, level)
        self._doubt(members)
        self._require(members)

    async def wake(self, names: Iterable[str]) -> None:
        """Have engines serve again what they fell asleep with. Raises what the first said that does not."""
        members = {name: self._fleet.engines[name] for name in names}
        self.begin(members, 0)
        await self.go_on(await self.pause(members))
        self._require(members)

    def _fall_asleep(self, name: str, record: EngineRecord, level: int) -> None:
        self.enter([name], EngineState.ASLEEP, record.version if level == 1 else 0)

    def _doubt(self, members: Mapping[str, EngineMember]) -> None:
        """Mark those that may yet stop serving, or have stopped though their call failed."""
        for name, member in members.items():
            record, error = member.record, self.failures.get(name)
            if record.state not in (EngineState.SERVING, EngineState.PAUSING):
                continue
            if self._halts.unanswered(name, record):
                self.enter([name], EngineState.PAUSING)
            elif isinstance(error, EngineError | PeerError):
                self.enter([name], EngineState.PAUSING)  # it may have failed after it stopped
                self._undo(self._after_late_pause(name, record, error))
            elif record.state is EngineState.PAUSING:
                self.enter([name], EngineState.SERVING, record.version)  # it says that it went on by itself

    def _undo(self, work: Coroutine[object, object, None]) -> None:
        undoing = asyncio.ensure_future(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _after_late_pause(self, name: str, record: EngineRecord, error: WeightSyncError | None) -> None:
        """Let an engine go on that has paused, or may have; wait for a running update to end first."""
        async with self._update_lock.shared(name):
            if not self._is_in_doubt(name, record) or self._settles(name, record, error):
                return
            logger.warning("engine %s paused late: it goes on with version %d", name, record.version)
            await self.resume([name], record.version)

    async def _after_late_sleep(
        self, name: str, record: EngineRecord, level: int, error: WeightSyncError | None
    ) -> None:
        async with self._update_lock.shared(name):
            if not self._is_in_doubt(name, record) or self._settles(name, record, error):
                return
            if error:
                self._blame(name, "sleep", error)
            else:
                self._fall_asleep(name, record, level)

    def _is_in_doubt(self, name: str, record: EngineRecord) -> bool:
        """Whether it still is: no update took it since, it was not replaced, nothing more is unanswered."""
        member = self._fleet.engines.get(name)
        same = member is not None and member.record is record and record.state is EngineState.PAUSING
        return same and not self._halts.unanswered(name, record)

    def _settles(self, name: str, record: EngineRecord, error: WeightSyncError | None) -> bool:
        """Whether a late `error` says what the engine does now: it is gone, or goes on by itself."""
        if isinstance(error, _GONE):
            self.lost(name, error)
        elif isinstance(error, DeadlineError):
            self.enter([name], EngineState.SERVING, record.version)
        else:
            return False
        return True

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if error := self.failures.get(name):
                raise error

    async def go_on(self, names: Iterable[str]) -> None:
        """Let engines that were paused in vain serve what they have."""
        for name in names:
            if version := self._fleet.engines[name].record.version:
                await self.resume([name], version)

    def compare(
        self, connection: Connection, digests: Mapping[str, Sequence[Digests]], expected: Digests
    ) -> dict[str, list[str]]:
        """Compare every rank's digests with the trainers'; returns by engine the tensors that differ."""
        plan, wrong = connection.plan, {}
        for name, ranks in digests.items():
            differs = (connection.reductions[name](ranks) != expected).any(axis=0)
            wrong[name] = [plan.tensors[i].name for i in np.flatnonzero(differs)]
        return wrong

    def judge(self, version: int, wrong: Mapping[str, Sequence[str]], changed: Rewritten) -> list[str]:
        """Blame engines that hold `wrong` tensors; returns those that hold `version`.

        Where tensors were `changed` while they were read, no engine is at fault for those.
        """
        for name, tensors in wrong.items():
            own = [tensor for tensor in tensors if not any(tensor in those for those in changed.values())]
            if own:
                self._blame(name, "verify", VerifyError(name, version, own))
            elif tensors:
                writers = [(who, [t for t in tensors if t in those]) for who, those in changed.items()]
                error = SourceChangedError(version, [(who, those) for who, those in writers if those])
                self._blame(name, "verify", error)
        return [name for name, tensors in wrong.items() if not tensors]

    async def ask(
        self,
        members: Mapping[str, EngineMember],
        phase: str,
        call: Callable[[EnginePeer], Coroutine[object, object, T]],
        when_lost: Callable[[EngineMember], Coroutine[object, object, None]] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """The answers of the engines that answered; the others are blamed."""

        calls = {name: _describe(member, call(member.peer), when_lost) for name, member in members.items()}
        return await self._gather(calls, phase, timeout_s)

    async def load(self, member: EngineMember, attempt: int) -> Sequence[Digests]:
        """What an engine loads in an update, without a deadline; one that is lost keeps no holder waiting."""
        return await _describe(member, member.peer.load(attempt, self._config.timeout_s), self.drop)

    def blame(self, phase: str, failures: Mapping[str, WeightSyncError]) -> None:
        """Each engine that failed, by its name."""
        for name, error in failures.items():
            self._blame(name, phase, error)

    def kept_up(self, names: Iterable[str]) -> None:
        """These took an update in time, or are others than before: what was slow is forgotten."""
        for name in names:
            self._num_slow.pop(name, None)

    def num_slow(self, name: str) -> int:
        """In how many updates running an engine was too slow."""
        return self._num_slow[name]

    def left_behind(self, name: str) -> None:
        """An update could not wait for a refill to stop. Is the engine slow again, it counts as hung."""
        stuck = (EngineState.STALE, EngineState.REFILLING)
        if self._num_slow[name] and self._fleet.engines[name].record.state in stuck:
            self._num_slow[name] += 1
            self.lost(name, DeadlineError("ending an earlier load", (f"engine {name}",), GRACE_S))

    async def _gather(
        self, calls: Mapping[str, Coroutine[object, object, T]], phase: str, timeout_s: float | None = None
    ) -> dict[str, T]:
        named = {f"engine {name}": call for name, call in calls.items()}
        outcome = await gather_named(named, phase, (timeout_s or self._config.timeout_s) + GRACE_S)
        for name in calls:
            if error := outcome.failures.get(f"engine {name}"):
                self._blame(name, phase, error)
        return {
            name: outcome.answers[f"engine {name}"] for name in calls if f"engine {name}" in outcome.answers
        }

    async def drop(self, member: EngineMember) -> None:
        """The holders of a dead engine stop waiting for it, as far as they are there."""
        calls = {f"holder {i}": self._fleet.holders[i].drop_engine() for i in member.holders}
        await gather_named(calls, "drop", GRACE_S)

    def lost(self, name: str, error: WeightSyncError) -> None:
        """An engine was found dead or deaf while nobody asked it anything."""
        error.where = Where(name, _rank(error), self._fleet.engines[name].record.version, "idle")
        self.failures[name] = error
        self.enter([name], EngineState.DEAD)
        self._events.publish(EngineFailed(name, error))

    def _blame(self, name: str, phase: str, error: WeightSyncError) -> None:
        hung = False
        if isinstance(error, SlowError):
            self._num_slow[name] += 1
            if hung := self._num_slow[name] > 1:
                what = f"{error.phase} (too slow in {self._num_slow[name]} updates running)"
                error = DeadlineError(what, error.missing, error.timeout_s)
        error.where = Where(name, _rank(error), self._version.get(name, 0), phase)
        logger.warning("%s: %s", error.where, error)
        self.failures[name] = error
        member, gone = self._fleet.engines[name], isinstance(error, _GONE)
        if gone or not _is_unharmed(phase, member.record.state, error):
            self.enter([name], EngineState.DEAD if gone or hung else EngineState.STALE)
            self._events.publish(EngineFailed(name, error))
        member.attached = member.attached and not (gone or hung)

    def enter(self, names: Iterable[str], state: EngineState, version: int = 0) -> None:
        for name in names:
            self._fleet.engines[name].record.enter(state, version)


async def _describe(
    member: EngineMember,
    call: Coroutine[object, object, T],
    when_lost: Callable[[EngineMember], Coroutine[object, object, None]] | None,
) -> T:
    try:
        return await call
    except _GONE:
        if when_lost:
            await when_lost(member)
        raise


def _is_unharmed(phase: str, state: EngineState, error: WeightSyncError) -> bool:
    """Whether an engine is after a failure as it was before: who did not pause serves on what it had.

    Not so where the engine says that it failed with its memory half given back, or half taken again.
    """
    if isinstance(error, EngineError) and (phase == "sleep" or state is EngineState.ASLEEP):
        return False
    return phase in ("pause", "sleep")


def _rank(error: WeightSyncError) -> int | None:
    return error.rank if isinstance(error, EngineError) else None


_Late = Callable[[WeightSyncError | None], None]


class Halts:
    """At most one unanswered pause or sleep of each engine.

    A call that was given up may still arrive: an engine's process that was stopped takes it once it goes on.
    Therefore the next call waits for the answer to the last one, so that they never overlap in the engine.
    """

    def __init__(self) -> None:
        self._unanswered: dict[str, tuple[EngineRecord, asyncio.Task[None]]] = {}

    def unanswered(self, name: str, record: EngineRecord) -> bool:
        """Whether a call to this engine was made, and not answered yet."""
        return self._task(name, record) is not None

    async def ask(
        self,
        name: str,
        record: EngineRecord,
        call: Callable[[], Coroutine[object, object, None]],
        late: _Late,
    ) -> None:
        """Await `call`, and what was asked of this engine before. Raises as `call`.

        When the wait is cancelled, `call` goes on, and `late` is told how it ended.
        """
        if before := self._task(name, record):
            await asyncio.wait([before])
        task = asyncio.ensure_future(call())
        self._unanswered[name] = record, task
        task.add_done_callback(lambda _: self._forget(name, task))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: _tell(task, late))
            raise

    def _task(self, name: str, record: EngineRecord) -> asyncio.Task[None] | None:
        known, task = self._unanswered.get(name, (None, None))
        return task if known is record else None  # else another actor has that name now

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._unanswered[name][1] is task:
            del self._unanswered[name]


def _tell(task: asyncio.Task[None], late: _Late) -> None:
    if task.cancelled():
        return  # the driver ends
    error = task.exception()
    if error is None or isinstance(error, WeightSyncError):
        late(error)
    else:
        raise error  # a bug: the loop logs it
