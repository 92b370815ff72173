"""The lifecycle of an update, the same for every placement: publish, pause, move, verify, commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from weightsync.clock import PhaseClock
from weightsync.config import SyncConfig
from weightsync.connect import Connection, connect
from weightsync.deadline import GRACE_S, gather_named
from weightsync.errors import (
    ConfigError,
    PeerLostError,
    StateError,
    TransportError,
    VerifyError,
    WeightSyncError,
)
from weightsync.peers import EnginePeer, EngineSeat, Fleet, HolderPeer
from weightsync.plan import Plan
from weightsync.report import SyncReport
from weightsync.states import EngineState
from weightsync.verify import Digests, combine

if TYPE_CHECKING:
    from weightsync.memory import BufferHandle

__all__ = ["Controller"]

logger = logging.getLogger("weightsync.controller")

T = TypeVar("T")


class Controller:
    """Takes a fleet through one version after another. Not for concurrent use.

    Attributes:
        version: the newest committed version, 0 before the first.
        connected: False before ``connect``, and again once a member is lost.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self.version = 0
        self.connected = False
        self._epoch = 0
        self._attempt = 0
        self._published = 0
        self._arenas: Sequence[BufferHandle | None] = ()
        self._expected: Digests | None = None
        self._failures: dict[str, WeightSyncError] = {}
        self._connection: Connection | None = None

    @property
    def plan(self) -> Plan | None:
        """Of the present membership epoch, None before ``connect``."""
        return self._connection.plan if self._connection else None

    async def connect(self) -> None:
        """Plan and connect the fleet as it is now. Raises as `connect` does."""
        self.connected = False
        self._epoch += 1
        self._connection = connection = await connect(self._fleet, self._config, self._epoch)
        self.connected = True
        logger.info("epoch %d: %d buckets, %s", self._epoch, connection.plan.num_buckets, connection.seconds)

    async def update(self, version: int, when_held: Callable[[], None] = lambda: None) -> SyncReport:
        """Take `version` from the trainers to every live engine.

        `when_held` is called as soon as the holders have every byte, so that the trainers may go on.

        Raises:
            StateError: not connected, or fewer than ``min_engines`` engines are alive.
            ConfigError: `version` is not greater than the last that committed.
            WeightSyncError: what went wrong first, when fewer than ``min_engines`` took it. A failed
                publish leaves every engine as it was; later failures leave the engines STALE.
        """
        if not self.connected:
            raise StateError("connect() has to come before update_weights()")
        if version <= self.version:
            raise ConfigError("version", version, f"versions grow: give more than {self.version}")
        takers = self._fleet.live()
        if len(takers) < self._config.min_engines:
            raise StateError(
                f"{len(takers)} engines are alive, sync.min_engines is {self._config.min_engines}"
            )
        assert self._connection is not None
        clock, least = PhaseClock(), self._config.min_engines
        self._failures = {}
        if self._connection.in_place:
            with clock.phase("publish"):
                paused = await self._publish_and_pause(takers, version)
            return await self._deliver(takers, paused, least, clock, when_held)
        with clock.phase("publish"):
            await self._publish(version)
        when_held()
        with clock.phase("pause"):
            paused = await self._pause(takers)
        return await self._deliver(takers, paused, least, clock)

    @property
    def refillable(self) -> bool:
        """Whether what the holders keep is the committed version."""
        now = self._connection
        kept = now is not None and not now.in_place and now.arenas == self._arenas
        return kept and self.connected and self.version > 0 and self._published == self.version

    async def refill(self, name: str) -> SyncReport:
        """Bring one engine to the version that the holders keep; trainers and others are not asked.

        Raises StateError unless `refillable`, else as `update`.
        """
        if not self.refillable:
            raise StateError("the holders keep no committed version: call update_weights() with the next one")
        clock, takers = PhaseClock(), {name: self._fleet.engines[name]}
        self._failures = {}
        with clock.phase("pause"):
            paused = await self._pause(takers)
        return await self._deliver(takers, paused, 1, clock)

    async def _publish(self, version: int) -> None:
        assert self._connection is not None
        self._published = 0  # one that fails leaves the holders with parts of two versions
        calls = {f"trainer {i}": t.publish() for i, (t, _) in enumerate(self._fleet.trainers)}
        shares = (await gather_named(calls, "publish", self._config.timeout_s)).require()
        self._expected = combine(list(shares.values()))
        self._published, self._arenas = version, self._connection.arenas

    async def _publish_and_pause(self, takers: Mapping[str, EngineSeat], version: int) -> Sequence[str]:
        """Both at once: what is read in place is published in the time that it takes to pause."""
        published, paused = await asyncio.gather(
            self._publish(version), self._pause(takers), return_exceptions=True
        )
        if isinstance(paused, BaseException):
            raise paused
        if isinstance(published, BaseException):
            await self._go_on(paused)
            raise published
        return paused

    async def _pause(self, takers: Mapping[str, EngineSeat]) -> Sequence[str]:
        mode, timeout_s = self._config.pause, self._config.timeout_s
        paused = list(await self._ask(takers, "pause", lambda peer: peer.pause(mode, timeout_s)))
        self._enter(paused, EngineState.PAUSED)
        return paused

    async def _deliver(
        self,
        takers: Mapping[str, EngineSeat],
        paused: Sequence[str],
        least: int,
        clock: PhaseClock,
        when_moved: Callable[[], None] = lambda: None,
    ) -> SyncReport:
        version = self._published
        if len(paused) < least:
            await self._go_on(paused)
            raise next(iter(self._failures.values()))
        with clock.phase("move"):
            digests = await self._move([name for name in takers if name in paused])
        when_moved()
        with clock.phase("verify"):
            verified = self._verify(version, digests)
        if len(verified) < least:
            self._enter(verified, EngineState.STALE)
            raise next(iter(self._failures.values()))
        with clock.phase("commit"):
            num_serving = await self._resume(verified, version)
        if num_serving:
            self.version = version
        if num_serving < least:
            raise next(iter(self._failures.values()))
        return self._report(clock)

    async def _resume(self, names: Iterable[str], version: int) -> int:
        """Let engines serve `version`, which they hold; how many do."""
        seats = {name: self._fleet.engines[name] for name in names}
        serving = await self._ask(seats, "commit", lambda peer: peer.resume(version))
        self._enter(serving, EngineState.SERVING, version)
        return len(serving)

    async def _go_on(self, names: Iterable[str]) -> None:
        """Let engines that were paused in vain serve what they have."""
        for name in names:
            if version := self._fleet.engines[name].record.version:
                await self._resume([name], version)

    async def _move(self, takers: Sequence[str]) -> dict[str, Sequence[Digests]]:
        """One attempt: holders broadcast and feed, engines load; returns each engine's digests by rank."""
        self._attempt += 1
        attempt, timeout_s = self._attempt, self._config.timeout_s
        self._enter(takers, EngineState.WRITING)
        seats = {name: self._fleet.engines[name] for name in takers}
        fed = {holder for seat in seats.values() for holder in seat.holders}

        async def move(index: int, holder: HolderPeer) -> float:
            try:
                return await holder.move(attempt, index in fed, timeout_s)
            except PeerLostError as error:
                await self._abort(str(error))
                raise

        moves = {f"holder {i}": move(i, holder) for i, holder in enumerate(self._fleet.holders)}
        loaded, moved = await asyncio.gather(
            self._ask(seats, "move", lambda peer: peer.load(attempt, timeout_s), self._drop),
            gather_named(moves, "move", timeout_s + GRACE_S),
        )
        if moved.failures:
            # A broadcast that broke leaves no engine with a whole version.
            self.connected = False
            self._enter(loaded, EngineState.STALE)
            raise min(moved.failures.values(), key=_remoteness)
        return loaded

    def _verify(self, version: int, digests: Mapping[str, Sequence[Digests]]) -> list[str]:
        """Compare every rank's digests with the trainers'; returns the engines that hold `version`."""
        assert self._connection is not None
        plan, good = self._connection.plan, []
        for name, ranks in digests.items():
            wrong = (self._connection.folds[name](ranks) != self._expected).any(axis=0)
            if wrong.any():
                tensors = [plan.tensors[i].name for i in np.flatnonzero(wrong)]
                self._blame(name, "verify", VerifyError(name, version, tensors))
            else:
                good.append(name)
        return good

    async def _ask(
        self,
        seats: Mapping[str, EngineSeat],
        phase: str,
        call: Callable[[EnginePeer], Coroutine[object, object, T]],
        when_lost: Callable[[EngineSeat], Coroutine[object, object, None]] | None = None,
    ) -> dict[str, T]:
        """The answers of the engines that answered; the others are blamed."""

        async def one(seat: EngineSeat) -> T:
            try:
                return await call(seat.peer)
            except PeerLostError:
                if when_lost:
                    await when_lost(seat)
                raise

        calls = {f"engine {name}": one(seat) for name, seat in seats.items()}
        outcome = await gather_named(calls, phase, self._config.timeout_s + GRACE_S)
        for name in seats:
            if error := outcome.failures.get(f"engine {name}"):
                self._blame(name, phase, error)
        return {
            name: outcome.answers[f"engine {name}"] for name in seats if f"engine {name}" in outcome.answers
        }

    async def _abort(self, cause: str) -> None:
        """Free the holders that wait for a lost one in a broadcast."""
        calls = {name: holder.abort(cause) for name, holder in self._fleet.named_holders().items()}
        await gather_named(calls, "abort", self._config.timeout_s)

    async def _drop(self, seat: EngineSeat) -> None:
        """The holders of a dead engine stop waiting for it."""
        for holder in seat.holders:
            await self._fleet.holders[holder].drop_engine()

    def _blame(self, name: str, phase: str, error: WeightSyncError) -> None:
        logger.warning("%s", error)
        self._failures[name] = error
        lost = isinstance(error, PeerLostError)
        if lost or phase != "pause":  # who did not pause serves on what it had
            self._enter([name], EngineState.DEAD if lost else EngineState.STALE)
        # The next plan has no place for the dead.
        self.connected = self.connected and not lost

    def _enter(self, names: Iterable[str], state: EngineState, version: int = 0) -> None:
        for name in names:
            self._fleet.engines[name].record.enter(state, version)

    def _report(self, clock: PhaseClock) -> SyncReport:
        assert self._connection is not None
        assert self._expected is not None
        plan = self._connection.plan
        records = {name: seat.record for name, seat in self._fleet.engines.items()}
        return SyncReport(
            version=self.version,
            nbytes=plan.total_nbytes,
            seconds=clock.total(),
            phases=clock.seconds,
            verified=True,
            engines={name: record.version for name, record in records.items()},
            states={name: record.state.value for name, record in records.items()},
            failures={name: str(error) for name, error in self._failures.items()},
            digest=f"{int(np.add.reduce(self._expected, dtype=np.uint64)):016x}",
            num_buckets=plan.num_buckets,
            epoch=plan.epoch,
            connect_phases=self._connection.seconds,
        )


def _remoteness(error: WeightSyncError) -> int:
    """From the cause: who is lost, then what a holder says of itself, then that others are missed."""
    return 0 if isinstance(error, PeerLostError) else 2 if isinstance(error, TransportError) else 1
