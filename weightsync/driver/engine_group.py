"""Fans calls out to all engines in parallel and records which ones fail."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.events import EngineFailed, Events
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.driver.update_lock import UpdateLock
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerError,
    PeerLostError,
    RankLostError,
    SlowError,
    SourceChangedError,
    StateError,
    VerifyError,
    WeightSyncError,
    Where,
)
from weightsync.protocol.messages import Fingerprint, LoadReport
from weightsync.protocol.peers import EnginePeer

logger = logging.getLogger("weightsync.driver")

T = TypeVar("T")
Rewritten = Mapping[str, frozenset[str]]
"""Tensors that changed after they were published, by the name of the trainer that wrote them."""

_GONE = (PeerLostError, RankLostError)
"""Errors that make an engine DEAD: the engine's process, or a rank's process, is gone."""


class EngineGroup:
    """Calls engines, and keeps their states and failures, in updates and refills.

    Attributes:
        failures: each engine's error in the last update or refill that it took part in.
        num_slow: in how many updates in a row each engine was too slow.
        told: the last version that engines of an update were told to serve, and its fingerprint. They may
            serve it although no engine has answered.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, events: Events, update_lock: UpdateLock) -> None:
        self._config, self._fleet, self._events, self._update_lock = config, fleet, events, update_lock
        self._attempt = 0
        self.failures: dict[str, WeightSyncError] = {}
        self._version: dict[str, int] = {}
        self.told: tuple[int, Fingerprint] = 0, np.zeros(3, np.uint64)
        self.num_slow: Counter[str] = Counter()
        self._halts, self._undoing = Halts(), set[asyncio.Future[None]]()

    def first_failure(self, names: Collection[str] = ()) -> WeightSyncError:
        """Return the first of the last update's `failures`, of engines in `names` if one of them failed.

        Without any, deployments lack engines.
        """
        lacking = StateError("no deployment is whole: heal or replace its engines, see engine_states()")
        own = [error for name, error in self.failures.items() if name in names]
        return next(iter(own or self.failures.values()), lacking)

    def next_attempt(self) -> int:
        """Return a new attempt number, greater than all before."""
        self._attempt += 1
        return self._attempt

    def require_unserved(self, version: int, published: Fingerprint) -> None:
        """Raise StateError if engines may serve other weights as `version`."""
        told, fingerprint = self.told
        if version == told and (published != fingerprint).any():
            raise StateError(
                f"engines may serve other weights as version {told}, since no engine answered its commit: "
                "give a greater version, or none"
            )

    def begin(self, names: Iterable[str], version: int) -> None:
        """Note that engines are about to take `version`, and forget their last failures."""
        for name in names:
            self.failures.pop(name, None)
            self._version[name] = version

    async def pause(self, takers: Mapping[str, EngineMember]) -> Sequence[str]:
        """Pause engines in parallel; return the names of paused engines. Late pauses are undone."""
        how = self._config.pause, self._config.timeout_s
        calls = {
            name: self._halt(name, each, partial(each.peer.pause, *how)) for name, each in takers.items()
        }
        paused = list(await self._gather(calls, "pause"))
        self.enter(paused, EngineState.PAUSED)
        self._doubt(takers)
        return paused

    async def pause_together(self, takers: Mapping[str, EngineMember]) -> Sequence[str]:
        """Pause engines, and resume those of a deployment with an engine that did not pause.

        Returns the paused engines. Otherwise the next version would leave such a deployment with two
        versions.
        """
        paused = await self.pause(takers)
        serves = (EngineState.SERVING, EngineState.PAUSING)
        serving = {name for name, member in self._fleet.engines.items() if member.record.state in serves}
        left = [name for name in paused if serving.intersection(self._fleet.together(name))]
        await self.go_on(left)
        return [name for name in paused if name not in left]

    async def resume(self, names: Iterable[str], version: int) -> int:
        """Resume serving `version`. Returns how many engines resumed; lost engines are skipped.

        While other engines of the deployment do not hold the version, an engine is READY instead. When the
        last of them holds the version, all engines of the deployment resume.
        """
        live = self._fleet.live()
        able = dict.fromkeys(name for name in names if name in live)
        held = {name for name, member in live.items() if name in able or _holds(member.record, version)}
        members = {
            each: live[each]
            for name in able
            if held.issuperset(mates := self._fleet.together(name))
            for each in mates
            if each in able or live[each].record.state is EngineState.READY
        }
        self.enter(able.keys() - members.keys(), EngineState.READY, version)
        serving = await self.ask(members, "commit", lambda peer: peer.resume(version))
        self.enter(serving, EngineState.SERVING, version)
        return len(serving)

    async def sleep(self, names: Iterable[str], level: int) -> None:
        """Pause engines and release their memory, in up to twice ``timeout_s``.

        Raises the error of the first engine that failed.
        """
        members = {name: self._fleet.engines[name] for name in names}
        self.begin(members, 0)
        how = level, self._config.pause, self._config.timeout_s
        calls = {n: self._halt(n, each, partial(each.peer.sleep, *how), level) for n, each in members.items()}
        for name in await self._gather(calls, "sleep", 2 * self._config.timeout_s):
            self.enter([name], EngineState.ASLEEP, members[name].record.version if level == 1 else 0)
        self._doubt(members)
        _require(self.failures, members)

    async def wake(self, names: Iterable[str]) -> None:
        """Let engines serve the version that they sleep with. Raises the first failed engine's error."""
        members = {name: self._fleet.engines[name] for name in names}
        self.begin(members, 0)
        await self.go_on(await self.pause(members))
        _require(self.failures, members)

    async def _halt(self, name: str, member: EngineMember, call: _Halt, level: int | None = None) -> None:
        await self._halts.ask(name, member.record, call, partial(self._undo, name, member.record, level))

    def _doubt(self, members: Mapping[str, EngineMember]) -> None:
        """Mark engines PAUSING that may yet stop serving, or stopped although their call failed."""
        for name, member in members.items():
            record, error = member.record, self.failures.get(name)
            if record.state not in (EngineState.SERVING, EngineState.PAUSING):
                continue
            if self._halts.unanswered(name, record):
                self.enter([name], EngineState.PAUSING)
            elif isinstance(error, EngineError | PeerError):
                self.enter([name], EngineState.PAUSING)  # it may have failed after it stopped
                self._undo(name, record, None, error)
            elif record.state is EngineState.PAUSING:
                self.enter([name], EngineState.SERVING, record.version)  # the engine resumed by itself

    def _undo(
        self, name: str, record: EngineRecord, level: int | None, error: WeightSyncError | None
    ) -> None:
        """Start to resume an engine that may have paused late, or to note that it slept late to `level`."""
        undoing = asyncio.ensure_future(self._after_late(name, record, level, error))
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def _after_late(
        self, name: str, record: EngineRecord, level: int | None, error: WeightSyncError | None
    ) -> None:
        async with self._update_lock.shared(name):  # no update runs
            member = self._fleet.engines.get(name)
            if member is None or member.record is not record or record.state is not EngineState.PAUSING:
                return
            if self._halts.unanswered(name, record) or self._settles(name, record, error):
                return
            if level is None:
                logger.warning("[engine %s · v%d] paused late, and resumes", name, record.version)
                await self.resume([name], record.version)
            elif error:
                self.blame("sleep", {name: error})
            else:
                self.enter([name], EngineState.ASLEEP, record.version if level == 1 else 0)

    def _settles(self, name: str, record: EngineRecord, error: WeightSyncError | None) -> bool:
        """Return True if a late `error` settles the state. The engine is gone, or resumed by itself."""
        if isinstance(error, _GONE):
            self.lost(name, error)
        elif isinstance(error, DeadlineError):
            self.enter([name], EngineState.SERVING, record.version)
        else:
            return False
        return True

    async def go_on(self, names: Iterable[str]) -> None:
        """Resume paused engines with the version that they hold, since no update follows."""
        held = {name: self._fleet.engines[name].record.version for name in names}
        for version in {*held.values()} - {0}:  # most hold one
            await self.resume([name for name in held if held[name] == version], version)

    def judge(self, version: int, wrong: Mapping[str, Sequence[str]], changed: Rewritten) -> list[str]:
        """Record engines with `wrong` tensors as failed; return those that hold `version`.

        An engine is not at fault for tensors that were `changed` while they were read.
        """
        for name, tensors in wrong.items():
            own = [tensor for tensor in tensors if not any(tensor in those for those in changed.values())]
            if own:
                self.blame("verify", {name: VerifyError(name, version, own)})
            elif tensors:
                writers = [(writer, [t for t in tensors if t in those]) for writer, those in changed.items()]
                error = SourceChangedError(version, [(writer, those) for writer, those in writers if those])
                self.blame("verify", {name: error})
        return [name for name, tensors in wrong.items() if not tensors]

    async def ask(
        self,
        members: Mapping[str, EngineMember],
        phase: str,
        call: Callable[[EnginePeer], Coroutine[object, object, T]],
        when_lost: Callable[[EngineMember], Coroutine[object, object, None]] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, T]:
        """Call engines in parallel; return the answers, and record the others as failed."""
        calls = {name: _or_lost(member, call(member.peer), when_lost) for name, member in members.items()}
        return await self._gather(calls, phase, timeout_s)

    def load(self, member: EngineMember, attempt: int) -> Coroutine[object, object, LoadReport]:
        """Have an engine load, without a deadline. If the engine is lost, holders stop waiting for it."""
        return _or_lost(member, member.peer.load(attempt, self._config.timeout_s), self.drop)

    def blame(self, phase: str, failures: Mapping[str, WeightSyncError]) -> None:
        """Record failures by engine name, and set the engines' states."""
        for name, error in failures.items():
            hung = False
            if isinstance(error, SlowError):
                self.num_slow[name] += 1
                if hung := self.num_slow[name] > 1:
                    what = f"{error.phase} (too slow in {self.num_slow[name]} updates running)"
                    error = DeadlineError(what, error.missing, error.timeout_s)
            version = self._version.get(name, self._fleet.engines[name].record.version)
            error.where = Where(name, getattr(error, "rank", None), version, phase)
            logger.warning("[%s] %s", error.where, error)
            self.failures[name] = error
            member, gone = self._fleet.engines[name], isinstance(error, _GONE)
            if gone or not _is_unharmed(phase, member.record.state, error):
                self.enter([name], EngineState.DEAD if gone or hung else EngineState.STALE)
                self._events.publish(EngineFailed(name, error))
            member.attached = member.attached and not (gone or hung)

    def kept_up(self, names: Iterable[str]) -> None:
        """Forget that engines were slow: they took an update in time, or were replaced."""
        for name in names:
            self.num_slow.pop(name, None)

    def left_behind(self, name: str) -> None:
        """Handle a refill that did not stop for an update. If the engine was slow before, it is DEAD."""
        stuck = (EngineState.STALE, EngineState.REFILLING)
        if self.num_slow[name] and self._fleet.engines[name].record.state in stuck:
            self.num_slow[name] += 1
            self.lost(name, DeadlineError("ending an earlier load", (f"engine {name}",), GRACE_S))

    async def _gather(
        self, calls: Mapping[str, Coroutine[object, object, T]], phase: str, timeout_s: float | None = None
    ) -> dict[str, T]:
        named = {f"engine {name}": call for name, call in calls.items()}
        outcome = await gather_named(named, phase, (timeout_s or self._config.timeout_s) + GRACE_S)
        if outcome.failures:
            self.blame(phase, {name.removeprefix("engine "): e for name, e in outcome.failures.items()})
        return {
            name: outcome.answers[f"engine {name}"] for name in calls if f"engine {name}" in outcome.answers
        }

    async def drop(self, member: EngineMember) -> None:
        """Have the engine's holders stop waiting for it. Holders that do not answer are skipped."""
        calls = {f"holder {i}": self._fleet.holders[i].drop_engine() for i in member.holders}
        await gather_named(calls, "drop", GRACE_S)

    def lost(self, name: str, error: WeightSyncError) -> None:
        """Record an engine as DEAD, found dead or not answering outside a call."""
        error.where = Where(
            name, getattr(error, "rank", None), self._fleet.engines[name].record.version, "idle"
        )
        self.failures[name] = error
        self.enter([name], EngineState.DEAD)
        self._events.publish(EngineFailed(name, error))

    def enter(self, names: Iterable[str], state: EngineState, version: int = 0) -> None:
        for name in names:
            self._fleet.engines[name].record.enter(state, version)


def _require(failures: Mapping[str, WeightSyncError], names: Iterable[str]) -> None:
    for name in names:
        if error := failures.get(name):
            raise error


def _holds(record: EngineRecord, version: int) -> bool:
    """Return True if an engine serves `version`, or waits to serve it."""
    states = (EngineState.SERVING, EngineState.PAUSING, EngineState.READY)
    return record.state in states and record.version == version


async def _or_lost(
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
    """Return True if a failed engine is unchanged because it did not pause.

    If an engine's own sleep or wake failed, the engine is changed: memory may be half released or half
    restored.
    """
    if isinstance(error, EngineError) and (phase == "sleep" or state is EngineState.ASLEEP):
        return False
    return phase in ("pause", "sleep")


_Halt = Callable[[], Coroutine[object, object, None]]
_Late = Callable[[WeightSyncError | None], None]


class Halts:
    """At most one unanswered pause or sleep per engine.

    A call that was given up may still arrive: a stopped engine process handles it when it continues.
    Therefore the next call waits for the answer to the last one, so that they never overlap in the engine.
    """

    def __init__(self) -> None:
        self._unanswered: dict[str, tuple[EngineRecord, asyncio.Task[None]]] = {}

    def unanswered(self, name: str, record: EngineRecord) -> asyncio.Task[None] | None:
        """Return this engine's unanswered call, if there is one."""
        known, task = self._unanswered.get(name, (None, None))
        return task if known is record else None  # else the name now means another actor

    async def ask(self, name: str, record: EngineRecord, call: _Halt, late: _Late) -> None:
        """Await this engine's previous call, then `call`. Raises the errors of `call`.

        If the wait is cancelled, `call` continues, and `late` is called with its error or None.
        """
        if before := self.unanswered(name, record):
            await asyncio.wait([before])
        task = asyncio.ensure_future(call())
        self._unanswered[name] = record, task
        task.add_done_callback(lambda _: self._forget(name, task))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: _tell(task, late))
            raise

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._unanswered.get(name, (None, None))[1] is task:
            del self._unanswered[name]


def _tell(task: asyncio.Task[None], late: _Late) -> None:
    if task.cancelled():
        return  # the driver ends
    error = task.exception()
    if error is None or isinstance(error, WeightSyncError):
        late(error)
    else:
        raise error  # a bug: the loop logs it
