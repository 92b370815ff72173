"""Bringing one engine back, beside all others: connected with its holders, filled from those that keep."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager

from weightsync.config import SyncConfig
from weightsync.driver.connect import Connection, adopt
from weightsync.driver.engine_group import Crew
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineSeat, Fleet
from weightsync.driver.gather import GRACE_S, gather_named, remoteness
from weightsync.driver.snapshot_index import Keeping
from weightsync.driver.update_lock import Turns
from weightsync.errors import DeadlineError, StateError, WeightSyncError
from weightsync.protocol.messages import Digests, Kept, Refilled
from weightsync.protocol.peers import EnginePeer
from weightsync.protocol.timing import PhaseClock

__all__ = ["GaveWayError", "Refiller"]


class GaveWayError(StateError):
    """An update came in between; the engine takes part in it if it is attached."""


class Refiller:
    """The part of the controller that works while no update does."""

    def __init__(self, config: SyncConfig, fleet: Fleet, crew: Crew, keeping: Keeping, turns: Turns) -> None:
        self._config, self._fleet = config, fleet
        self._crew, self._keeping, self._turns = crew, keeping, turns

    async def adopt(self, connected: Callable[[], Connection], name: str) -> None:
        """Connect an engine that came, or came back, after the others. Raises as `connect.adopt` does.

        `connected` is asked once no update runs any more, since one may connect anew.
        """
        async with self._beside(name, lambda: self._crew.drop(self._fleet.engines[name])):
            if not self._fleet.engines[name].attached:
                await adopt(self._fleet, connected(), name, self._config)

    async def refill(
        self,
        connected: Callable[[], Connection],
        committed: Callable[[], int],
        name: str,
        clock: PhaseClock,
    ) -> Refilled:
        """Bring one engine to the version that is `committed`; what its ranks read, together.

        Raises:
            StateError: nobody keeps that version, or the engine is not attached.
            WeightSyncError: what went wrong; the engine is STALE or DEAD.
        """
        async with self._beside(name, lambda: self._stop(self._fleet.engines[name])):
            await self._keeping.copied()  # an update may have come in between
            seat, connection, version = self._fleet.engines[name], connected(), committed()
            kept = self._keeping.kept(version, connection, name)
            if kept is None or not seat.attached:
                raise StateError("no holder keeps the committed version: call update_weights() with the next")
            self._crew.begin([name], version)
            with clock.phase("pause"):
                paused = await self._crew.pause({name: seat})
            if not paused:
                raise self._crew.failures[name]
            with clock.phase("move"):
                loaded, refilled = await self._read(name, seat, kept)
            with clock.phase("verify"):
                assert self._keeping.expected is not None
                wrong = self._crew.compare(connection, loaded, self._keeping.expected)
                verified = self._crew.judge(version, wrong, {})
            with clock.phase("commit"):
                if not await self._crew.resume(verified, version):
                    raise self._crew.failures[name]
            return refilled

    @asynccontextmanager
    async def _beside(self, name: str, end: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        stopped = False

        async def stop() -> None:
            nonlocal stopped
            stopped = True
            await end()

        try:
            async with self._turns.beside(name, stop):
                yield
        except WeightSyncError as error:
            if stopped:
                raise GaveWayError(str(error)) from error
            raise

    async def _stop(self, seat: EngineSeat) -> None:
        why = "an update brings a newer version"
        calls = {f"holder {i}": self._fleet.holders[i].stop_refill(why) for i in seat.holders}
        await gather_named(calls, "stop", GRACE_S)

    async def _read(
        self, name: str, seat: EngineSeat, kept: Kept
    ) -> tuple[dict[str, Sequence[Digests]], Refilled]:
        """Every rank loads what its holder reads, all at once."""
        attempt, direct = self._crew.next_attempt(), self._config.refill == "auto"
        timeout_s, limit_s = self._config.timeout_s, self._config.connect_timeout_s
        self._crew.enter([name], EngineState.REFILLING)
        reads = {
            f"holder {i}": asyncio.ensure_future(
                self._fleet.holders[i].refill(attempt, kept.of_rank(rank), direct, timeout_s, limit_s)
            )
            for rank, i in enumerate(seat.holders)
        }

        async def load(peer: EnginePeer) -> Sequence[Digests]:
            return await _while_read(name, peer.load(attempt, timeout_s), reads.values(), timeout_s)

        try:
            loaded = await self._crew.ask({name: seat}, "refill", load, self._crew.drop, limit_s)
            # Whatever became of the engine, its holders are told or have told it: a silent one hangs.
            read = await gather_named({who: _answer(task) for who, task in reads.items()}, "refill", GRACE_S)
        finally:
            for task in reads.values():
                task.cancel()
        if any(isinstance(error, DeadlineError) for error in read.failures.values()):
            self._keeping.on_silence()
        if read.failures and seat.record.state is not EngineState.DEAD:
            # The cause; what the engine says is that its holder gave up.
            self._crew.enter([name], EngineState.STALE)
            raise min(read.failures.values(), key=remoteness)
        return loaded, _together(list(read.answers.values()))


async def _answer(task: asyncio.Task[Refilled]) -> Refilled:
    return await task


async def _while_read(
    name: str,
    load: Coroutine[object, object, Sequence[Digests]],
    reads: Iterable[asyncio.Task[Refilled]],
    timeout_s: float,
) -> Sequence[Digests]:
    """What `load` brings. Raises DeadlineError when it goes on for `timeout_s` after the last of `reads`."""
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


def _together(ranks: Sequence[Refilled]) -> Refilled:
    nbytes: Counter[str] = Counter()
    ways: dict[str, str] = {}
    for rank in ranks:
        nbytes.update(rank.bytes_from)
        ways |= rank.ways
    return Refilled(dict(nbytes), ways, max((rank.seconds for rank in ranks), default=0.0))
