"""Follows experts that engines moved to other slots, and has engines move them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection, adopt
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.verifying.comparison import Comparison
from weightsync.errors import MovedError, WeightSyncError
from weightsync.plan.layout.arrangement import Experts, arrangement_key
from weightsync.protocol.messages import Fingerprint
from weightsync.protocol.peers import EnginePeer
from weightsync.protocol.timing import PhaseClock


class MovedExperts:
    """Plans engines again whose experts moved. Other engines do not take part."""

    def __init__(
        self, config: SyncConfig, fleet: Fleet, engine_group: EngineGroup, connection: Connection
    ) -> None:
        self._config, self._fleet, self._engines = config, fleet, engine_group
        self._connection = connection

    async def follow(self, paused: Sequence[str]) -> Sequence[str]:
        """Plan the paused engines again whose experts moved since the last plan.

        Returns the engines that can take weights. The others are STALE or DEAD. If an engine cannot be
        planned alone, since it reads from trainers on other hosts, all engines resume, and this raises a
        MovedError.
        """
        planned_for = self._connection.moving
        members = {name: self._fleet.engines[name] for name in paused if name in planned_for}
        found = await self._engines.ask(members, "layout", lambda peer: peer.experts())
        moved = [name for name, experts in found.items() if arrangement_key(experts) != planned_for[name]]
        planned = await self._plan(moved)
        if not (router := self._connection.router).suffices:
            await self._engines.go_on(paused)
            reasons = [f"engine {name}, whose experts moved: {router.routes[name]}" for name in planned]
            raise MovedError("; ".join(reasons))
        able = found.keys() - set(moved) | set(planned)
        return [name for name in paused if name in able or name not in members]

    async def among(self, names: Sequence[str]) -> list[str]:
        """Return the engines of `names` whose experts moved since they were planned.

        Raises if an engine that moves experts does not answer.
        """
        planned_for = self._connection.moving
        asked = [name for name in names if name in planned_for]
        calls = {f"engine {name}": self._fleet.engines[name].peer.experts() for name in asked}
        found = (await gather_named(calls, "layout", self._config.timeout_s)).require()
        return [n for n in asked if arrangement_key(found[f"engine {n}"]) != planned_for[n]]

    async def move(
        self,
        experts: Mapping[str, Experts],
        version: int,
        comparison: Comparison,
        expected: Fingerprint,
        clock: PhaseClock,
    ) -> Sequence[str]:
        """Have engines that serve `version` move experts, and compare all their bytes with `expected`.

        Returns the engines that hold the version, which are still paused. The others keep serving with their
        experts in place, or are STALE or DEAD: `EngineGroup.failures`.
        """
        members = {name: self._fleet.engines[name] for name in experts}
        self._engines.begin(members, version)
        with clock.phase("pause"):
            paused = await self._engines.pause_together(members)
        self._engines.enter(paused, EngineState.WRITING)

        async def move(name: str) -> list[str]:
            def call(peer: EnginePeer) -> Coroutine[object, object, None]:
                return peer.move_experts(experts[name])

            return [*await self._engines.ask({name: members[name]}, "move", call)]

        with clock.phase("move"):
            moved = [name for names in await asyncio.gather(*map(move, paused)) for name in names]
        with clock.phase("layout"):
            planned = {name: members[name] for name in await self._plan(moved)}
        with clock.phase("verify"):
            digests = await self._engines.ask(planned, "verify", lambda peer: peer.live_digests())
            wrong = await comparison.wrong(self._connection.plan, digests, expected)
            return self._engines.judge(version, wrong, {})

    async def _plan(self, names: Sequence[str]) -> list[str]:
        """Plan engines with their present layouts. Returns the planned engines."""
        done = await asyncio.gather(*map(self._plan_one, names), return_exceptions=True)
        failures = {name: error for name, error in zip(names, done, strict=True) if error}
        for error in failures.values():
            if not isinstance(error, WeightSyncError):
                raise error
        self._engines.blame("layout", {n: e for n, e in failures.items() if isinstance(e, WeightSyncError)})
        return [name for name in names if name not in failures]

    async def _plan_one(self, name: str) -> None:
        # If this fails, the engine is adopted before it takes weights.
        self._fleet.engines[name].attached = False
        await adopt(self._fleet, self._connection, name, self._config)
        await self._connection.router.plan_reads(name)
