"""Heals failed engines in the background, as the policy decides, while the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from weightsync.config import SyncConfig
from weightsync.driver.connecting.linking import unlink_engine
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineBack, EngineFailed, EngineHealed, EngineLeftOut
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S
from weightsync.driver.healing.healing_policy import Action, Decision, decide
from weightsync.driver.updating.controller import Controller
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import EngineError, PlanError, TransportError, WeightSyncError
from weightsync.protocol.timing import PhaseClock
from weightsync.report import HealReport, SyncReport
from weightsync.text import count_text

logger = logging.getLogger("weightsync.driver")

_WHOLE = (EngineState.SERVING, EngineState.READY)
"""States of an engine that holds a verified version."""

_REMEDY = "; start its server again, bring another with add_engine(), or give register_engines(respawn=)"


class Healer:
    """Runs a task per failed engine until the engine serves again or is given up.

    Attributes:
        heals: one report per healed engine.
        given_up: the last failure of each engine that was given up.
    """

    def __init__(
        self,
        config: SyncConfig,
        fleet: Fleet,
        controller: Controller,
        respawn: Callable[[str], Awaitable[bool]],
        can_respawn: Callable[[str], bool],
        rejoin: Callable[[str], Awaitable[None]],
    ) -> None:
        """`respawn` ends an engine's process and starts another, which is placed when `respawn` returns.

        It returns False if the engine was only cut off and answers again: the process stays. `rejoin` places
        a DEAD engine again that is heard again.
        """
        self._config, self._fleet, self._controller = config, fleet, controller
        self._respawn, self._can_respawn, self._rejoin = respawn, can_respawn, rejoin
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._missed: dict[str, WeightSyncError] = {}
        self.heals: list[HealReport] = []
        self.given_up: dict[str, WeightSyncError] = {}
        controller.events.subscribe(EngineFailed, lambda event: self.engine_failed(event.name, event.error))
        controller.events.subscribe(EngineBack, lambda event: self.engine_back(event.name))
        controller.events.subscribe(EngineLeftOut, lambda event: self.engine_left_out(event.name))

    def engine_failed(self, name: str, failure: WeightSyncError) -> None:
        """Start to heal engine `name`, or note `failure` if a task for the engine runs."""
        if name in self._tasks:
            self._missed[name] = failure
        elif self._config.heal_attempts:
            self._start_task(name, self._heal(name, failure))
        else:
            self._start_task(name, self._let_go(name))

    def engine_back(self, name: str) -> None:
        """Rejoin engine `name`, which was silent and thus DEAD, unless a task for it runs."""
        if name not in self._tasks and self._is_dead(name):
            self._start_task(name, self._take_in(name))

    def engine_left_out(self, name: str) -> None:
        """Connect engine `name`, which was given up, for the next update, unless a task for it runs."""
        if name not in self._tasks and self._config.heal_attempts:
            self._start_task(name, self._connect(name))

    async def _connect(self, name: str) -> None:
        clock, cause = PhaseClock(), str(self.given_up.get(name, "it was not connected"))
        try:
            report = await self._fill(name)
        except WeightSyncError as error:
            logger.warning("[engine %s] takes no part in updates yet: %s", name, error)
            return
        if self._is_newest(name):
            self._healed(self._describe(name, cause, clock, None, report))

    async def _take_in(self, name: str) -> None:
        try:
            await self._rejoin(name)
        except WeightSyncError as error:
            logger.warning("[engine %s] answers again, and does not join yet: %s", name, error)
            return
        await self._heal(name, TransportError(f"engine {name} was not reached, and answers again"))

    def _start_task(self, name: str, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"heal {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def forget(self, name: str) -> bool:
        """Stop healing `name`: it is replaced or removed. Returns whether it was being healed."""
        self.given_up.pop(name, None)
        self._controller.engine_group.kept_up([name])
        if task := self._tasks.get(name):
            task.cancel()
        return task is not None

    def busy(self) -> list[str]:
        """Return the engines that are being healed."""
        return [*self._tasks]

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        missed = self._missed.pop(name, None)
        if task.cancelled():
            return
        if error := task.exception():
            logger.error("[engine %s] its healing ended: %r", name, error)
        elif missed and name not in self.given_up and self._is_dead(name):
            self.engine_failed(name, missed)

    def _is_dead(self, name: str) -> bool:
        member = self._fleet.engines.get(name)
        return member is not None and member.record.state is EngineState.DEAD

    async def _heal(self, name: str, failure: WeightSyncError) -> None:
        clock, respawned_at, cause = PhaseClock(), None, str(failure)
        # Every respawn after a slow update has used up an attempt.
        first = max(1, self._controller.engine_group.num_slow[name] - 1)
        for attempt in range(first, self._config.heal_attempts + 2):
            # A running update may still commit. From then on its version can be refilled.
            await self._controller.update_lock.idle()
            await self._controller.snapshot_index.settled()
            if name not in self._fleet.engines:
                return
            if self._is_dead(name):  # a refill might do for the first failure, and not for this
                failure = self._missed.pop(name, failure)
            decision = self._decide(name, failure, attempt)
            if self._is_newest(name):  # an update was quicker
                self._healed(self._describe(name, cause, clock, respawned_at, None))
                return
            if decision.action in (Action.DROP, Action.RAISE):
                self.given_up[name] = failure
                alive = self._fleet.engines[name].record.state is not EngineState.DEAD
                outlook = "waits for the next update" if alive else "is given up"
                attempts = count_text(attempt - 1, "attempt")
                remedy = "" if alive or self._can_respawn(name) else _REMEDY
                logger.error("[engine %s] %s after %s: %s%s", name, outlook, attempts, failure, remedy)
                await self._let_go(name)
                return
            logger.warning("[engine %s] %s, attempt %d: %s", name, decision.action.value, attempt, failure)
            try:
                await asyncio.sleep(decision.delay_s)
                if decision.action is Action.RESPAWN and await self._start(name):
                    respawned_at = clock.now()
                report = await self._fill(name)
            except WeightSyncError as error:
                if not self._is_newest(name):
                    failure = error
                    continue
                report = None  # an update was quicker
            if self._is_dead(name):  # it ended, or stopped answering, during the refill
                failure = self._missed.pop(name, failure)
                continue
            self._healed(self._describe(name, cause, clock, respawned_at, report))
            return

    async def _let_go(self, name: str) -> None:
        """Have holders unmap a dead engine's memory, which the next engine on the same GPUs needs."""
        if self._is_dead(name):
            await unlink_engine(self._fleet, name, GRACE_S)

    def _healed(self, heal: HealReport) -> None:
        self.heals.append(heal)
        self.given_up.pop(heal.engine, None)
        logger.warning("[driver] %s", heal)
        self._controller.events.publish(EngineHealed(heal))

    def _is_newest(self, name: str) -> bool:
        record = self._fleet.engines[name].record
        return record.state in _WHOLE and record.version == self._controller.version

    async def _start(self, name: str) -> bool:
        try:
            return await self._respawn(name)
        except WeightSyncError:
            raise
        except Exception as error:
            # The user's own code starts engines: any exception is a failed attempt.
            raise EngineError(name, "respawn", f"{type(error).__name__}: {error}") from error

    def _decide(self, name: str, failure: WeightSyncError, attempt: int) -> Decision:
        states = [member.record.state for member in self._fleet.engines.values()]
        return decide(
            failure,
            attempt=attempt,
            max_attempts=self._config.heal_attempts,
            backoff_s=self._config.heal_backoff_s,
            is_dead=self._is_dead(name),
            can_refill=self._controller.can_refill(name),
            can_respawn=self._can_respawn(name),
            num_live=sum(state not in (EngineState.DEAD, EngineState.STALE) for state in states),
            min_engines=self._config.min_engines,
        )

    async def _fill(self, name: str) -> SyncReport | None:
        """Adopt and refill the engine. Returns None if an update did it, or the next one has to."""
        while True:
            await self._controller.update_lock.idle()
            member = self._fleet.engines[name]
            if member.record.state in _WHOLE:
                return None
            if member.record.state is EngineState.DEAD:  # found so while an update ran
                raise self._missed.pop(name, EngineError(name, "refill", "it is dead"))
            try:
                await self._controller.adopt(name)
                # Waking it would take memory that a trainer uses.
                if member.record.state is EngineState.ASLEEP or not self._controller.can_refill(name):
                    return None
                return await self._controller.refill(name)
            except GaveWayError:
                continue
            except PlanError:
                self._controller.connected = False  # the next update connects the whole fleet again
                return None

    def _describe(
        self, name: str, cause: str, clock: PhaseClock, respawned_at: float | None, report: SyncReport | None
    ) -> HealReport:
        record = self._fleet.engines[name].record
        serving = record.state is EngineState.SERVING
        return HealReport(
            engine=name,
            cause=cause,
            version=record.version,
            died_at=clock.began,
            respawned_at=respawned_at,
            serving_at=clock.now() if serving else None,
            bytes_from=report.bytes_from if report else {},
            ways=report.ways if report else {},
            gb_per_s=report.gb_per_s if report else 0.0,
            verified=record.state in _WHOLE,
        )
