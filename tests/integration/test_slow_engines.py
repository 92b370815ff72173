"""Engines that do not keep up: the others commit, nobody is blamed for somebody else, and it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from tests.fleets.loop import Loop, drive
from tests.integration.test_healer import Respawned
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.healing.healing import Healer
from weightsync.errors import DeadlineError, SlowError

TIMEOUT_S = patient(0.5)
CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=TIMEOUT_S, connect_timeout_s=patient(30), heal_backoff_s=0.01
)
END_S = patient(60)


class Three(Loop):
    """Three engines, and sixteen buckets or more."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config, 3)
        self.held: list[Slow] = []

    def hold(self, name: str, buckets: range = range(99), seconds: float | None = None) -> Slow:
        """Hold an engine up for `seconds` in each of `buckets`, or until the test ends."""
        self.held.append(Slow(self, name, buckets, seconds))
        return self.held[-1]

    def make(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 31) if i % 2 else nn.Linear(31, 32) for i in range(16)))


class Slow:
    """See `Three.hold`."""

    def __init__(self, loop: Loop, name: str, buckets: range, seconds: float | None) -> None:
        self._end = threading.Event()
        self._buckets, self._seconds = buckets, seconds
        engine = loop.engines[name]
        self._take, self._engine = engine.take, engine
        engine.take = self.take  # type: ignore[method-assign]

    def take(self, bucket: int, pieces: object) -> None:
        if bucket in self._buckets:
            self._end.wait(END_S if self._seconds is None else self._seconds)
        self._take(bucket, pieces)  # type: ignore[arg-type]

    def end(self) -> None:
        self._end.set()
        self._engine.take = self._take  # type: ignore[method-assign]


def three(work: Callable[[Three], Coroutine[object, object, None]]) -> None:
    """`work` with three engines; what holds them up ends with it."""

    async def run(loop: Loop) -> None:
        assert isinstance(loop, Three)
        # Each holder and each engine takes a thread.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
        try:
            await work(loop)
        finally:
            for each in loop.held:
                each.end()

    drive(run, CONFIG, Three)


def states(loop: Loop) -> dict[str, EngineState]:
    return {name: member.record.state for name, member in loop.fleet.engines.items()}


async def served(loop: Loop) -> float:
    """Connect and serve version 1; what an undisturbed update takes."""
    await loop.controller.connect()
    assert loop.controller.plan is not None
    assert loop.controller.plan.num_buckets >= 16
    begun = time.monotonic()
    await loop.controller.update(1)
    return time.monotonic() - begun


def test_one_that_is_slow_for_ever_costs_two_updates_their_deadline_and_the_others_nothing() -> None:
    async def work(loop: Three) -> None:
        undisturbed = await served(loop)
        slow, took = loop.hold("e1"), []
        for version in range(2, 22):
            loop.train()
            begun = time.monotonic()
            report = await loop.controller.update(version)
            took.append(time.monotonic() - begun)
            assert report.engines == {"e0": version, "e1": 0, "e2": version}
            assert set(report.failures) <= {"e1"}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e2")
            assert loop.controller.connected
            assert (states(loop)["e1"] is EngineState.DEAD) == (version > 2)
        assert all(each < undisturbed + TIMEOUT_S for each in took[:2]), took
        # Less than one wait for it. A busy machine may take as long for one of them.
        assert sum(took[2:]) < len(took[2:]) * TIMEOUT_S / 2, took
        slow.end()

    three(work)


def test_the_slow_one_alone_is_blamed_and_for_its_own_time() -> None:
    async def work(loop: Three) -> None:
        await served(loop)
        slow = loop.hold("e1", range(0, 99), 0.4 * TIMEOUT_S)  # each bucket is just in time
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0, "e2": 2}
        assert set(report.failures) == {"e1"}
        error = loop.controller.engine_group.failures["e1"]
        assert isinstance(error, SlowError)
        assert error.missing == ("engine e1",)
        assert error.timeout_s == pytest.approx(0.9 * TIMEOUT_S)
        assert "together" in error.phase
        assert states(loop)["e1"] is EngineState.STALE
        slow.end()
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3, "e2": 3}
        assert not loop.controller.engine_group.num_slow["e1"]

    three(work)


def test_engines_that_are_slow_in_turns_but_in_time_all_commit() -> None:
    async def work(loop: Three) -> None:
        await served(loop)
        # Together more than a move may take, each on its own less.
        loop.hold("e0", range(0, 16, 15), 0.3 * TIMEOUT_S)
        loop.hold("e1", range(5, 6), 0.3 * TIMEOUT_S)
        loop.hold("e2", range(10, 11), 0.3 * TIMEOUT_S)
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2, "e2": 2}
        assert report.phases["move"] > TIMEOUT_S

    three(work)


@pytest.mark.parametrize("late", [range(0, 99), range(5, 99)], ids=["at once", "one after the other"])
def test_several_slow_ones_do_not_harm_the_quick_one(late: range) -> None:
    async def work(loop: Three) -> None:
        await served(loop)
        loop.hold("e1")
        loop.hold("e2", late)
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0, "e2": 0}
        for name in ("e1", "e2"):
            error = loop.controller.engine_group.failures[name]
            assert isinstance(error, SlowError)
            assert (error.missing, error.timeout_s) == ((f"engine {name}",), TIMEOUT_S / 2)
        assert loop.controller.connected

    three(work)


def test_one_whose_end_takes_too_long_is_named_by_the_controller_in_time() -> None:
    async def work(loop: Three) -> None:
        undisturbed, release = await served(loop), threading.Event()
        finish = loop.engines["e1"].finish
        loop.engines["e1"].finish = lambda: (release.wait(END_S), finish())[1]  # type: ignore[method-assign]
        begun = time.monotonic()
        report = await loop.controller.update(2)
        took = time.monotonic() - begun
        release.set()
        assert report.engines == {"e0": 2, "e1": 0, "e2": 2}
        error = loop.controller.engine_group.failures["e1"]
        assert isinstance(error, DeadlineError)
        assert error.missing == ("engine e1",)
        assert took < undisturbed + TIMEOUT_S + 1

    three(work)


def _healer(loop: Loop, respawn: Respawned) -> Healer:
    return Healer(CONFIG, loop.fleet, loop.controller, respawn, lambda _: True, respawn)


async def _healed(healer: Healer) -> None:
    deadline = time.monotonic() + END_S
    while healer.busy():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_one_that_is_slow_twice_is_started_anew_and_not_only_filled() -> None:
    async def work(loop: Three) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await served(loop)
        for version, times in ((2, 0), (3, 1)):
            slow = loop.hold("e1", range(0, 1), 0.6 * TIMEOUT_S)
            async with loop.controller.exclusive():
                await loop.controller.update(version)
            slow.end()
            await _healed(healer)
            assert respawn.times == times
            assert states(loop)["e1"] is EngineState.SERVING
            assert loop.fleet.engines["e1"].record.version == version
        slow.end()
        assert (await loop.controller.update(4)).engines == {"e0": 4, "e1": 4, "e2": 4}
        assert not loop.controller.engine_group.num_slow["e1"]

    three(work)


def test_one_that_stays_slow_when_started_anew_is_given_up() -> None:
    async def work(loop: Three) -> None:
        respawn = Respawned(loop)
        healer = _healer(loop, respawn)
        await served(loop)
        for version in range(2, 9):
            slow = loop.hold("e1", range(0, 1), 0.6 * TIMEOUT_S)
            async with loop.controller.exclusive():
                await loop.controller.update(version)
            slow.end()
            await _healed(healer)
        assert respawn.times == CONFIG.heal_attempts
        assert states(loop)["e1"] is EngineState.DEAD
        assert "too slow in 5 updates running" in str(healer.given_up["e1"])

    three(work)
