"""Engines that sleep between updates, over real holders; threads play the actors."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from tests.integration.test_controller import fail_to_publish, read_in_place
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.driver.healing.healing import Healer
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError, VerifyError

ASLEEP, PAUSED, SERVING, STALE = (
    EngineState.ASLEEP,
    EngineState.PAUSED,
    EngineState.SERVING,
    EngineState.STALE,
)
BOTH = ("e0", "e1")


def states(loop: Loop) -> list[EngineState]:
    return [member.record.state for member in loop.fleet.engines.values()]


def live_nbytes(loop: Loop, name: str) -> int:
    return sum(each.untyped_storage().nbytes() for each in loop.engines[name].tensors.values())


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_engines_have_no_memory_and_an_update_wakes_them(level: int) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.sleep(BOTH, level)  # before they ever served
        for version in (1, 2, 3):
            assert states(loop) == [ASLEEP] * 2
            assert [live_nbytes(loop, name) for name in BOTH] == [0, 0]
            with pytest.raises(StateError):
                loop.engines["e0"].generate([[1]], {})
            loop.train()
            assert (await loop.controller.update(version)).engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")
            assert loop.engines["e0"].generate([[1]], {}).version == version
            await loop.controller.sleep(BOTH, level)
            kept = version if level == 1 else 0
            assert {member.record.version for member in loop.fleet.engines.values()} == {kept}

    drive(work)


def test_one_may_sleep_while_the_other_serves() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.sleep(["e1"], 2)
        assert states(loop) == [SERVING, ASLEEP]
        assert loop.engines["e0"].serving() == 1

    drive(work)


def test_only_with_weights_on_the_host_they_wake_without_an_update() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        published = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        loop.train()
        await loop.controller.sleep(BOTH, 1)
        await loop.controller.wake(BOTH)
        assert states(loop) == [SERVING] * 2
        assert loop.engines["e1"].serving() == 1
        assert all(published[name].equal(held) for name, held in loop.engines["e1"].tensors.items())
        await loop.controller.sleep(BOTH, 2)
        with pytest.raises(StateError, match="e0 sleeps without weights: update_weights"):
            await loop.controller.wake(BOTH)
        assert states(loop) == [ASLEEP] * 2

    drive(work)


def test_engines_wake_at_the_same_time() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.sleep(BOTH, 1)
        both = threading.Barrier(2)
        for engine in loop.engines.values():
            resume = engine.resume
            engine.resume = lambda version, resume=resume: (both.wait(patient(5)), resume(version))
        await loop.controller.wake(BOTH)
        assert states(loop) == [SERVING] * 2

    drive(work)


def test_the_holders_fill_one_that_sleeps_without_weights() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        published = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        await loop.controller.sleep(BOTH, 2)
        loop.train()
        assert (await loop.controller.refill("e1")).engines == {"e0": 0, "e1": 1}
        assert states(loop) == [ASLEEP, SERVING]
        assert all(published[name].equal(held) for name, held in loop.engines["e1"].tensors.items())

    drive(work)


def test_a_fleet_that_is_connected_anew_sleeps_on() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.sleep(BOTH, 2)
        await loop.controller.connect()
        assert states(loop) == [ASLEEP] * 2
        assert live_nbytes(loop, "e0") == 0
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work)


def test_an_update_that_fails_once_weights_are_awake_is_followed_by_one_that_does_not() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.sleep(BOTH, 2)
        for engine in loop.engines.values():
            engine.on_write = lambda name: loop.engines["e0"].tensors["0.bias"].add_(1)
        loop.engines["e1"].on_write = broken
        with pytest.raises((VerifyError, EngineError)):
            await loop.controller.update(2)
        assert states(loop) == [STALE] * 2
        await loop.controller.sleep(["e0"], 2)
        assert states(loop) == [ASLEEP, STALE]
        for engine in loop.engines.values():
            engine.on_write = lambda _: None
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e0")

    drive(work)


def broken(_: str) -> None:
    raise MemoryError


def test_who_woke_in_vain_serves_what_it_kept_or_waits_for_the_next() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        read_in_place(loop)
        await loop.controller.sleep(["e0"], 1)
        await loop.controller.sleep(["e1"], 2)
        loop.source.publish = fail_to_publish  # type: ignore[method-assign]
        with pytest.raises(StateError, match="moved"):
            await loop.controller.update(2)
        assert states(loop) == [SERVING, PAUSED]
        assert (loop.engines["e0"].serving(), loop.engines["e1"].serving()) == (1, 0)
        del loop.source.publish
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive(work)


def test_who_cannot_sleep_or_does_not_pause_serves_on_and_the_others_sleep() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        for error in (
            ConfigError("options.enable_sleep_mode", False, "start engine e0 with true"),
            DeadlineError("pause (wait)", ("engine e0",), 5.0),
        ):
            loop.engines["e0"].sleep = raising(error)  # type: ignore[method-assign]
            with pytest.raises(type(error), match="engine e0"):
                await loop.controller.sleep(BOTH, 2)
            assert states(loop) == [SERVING, ASLEEP]

    drive(work)


@pytest.mark.parametrize("method", ["sleep", "pause"])
def test_who_fails_with_its_memory_half_there_is_stale(method: str) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        if method == "pause":
            await loop.controller.sleep(["e0"], 2)
        setattr(loop.engines["e0"], method, raising(EngineError("e0", method, "out of memory")))
        if method == "pause":
            report = await loop.controller.update(2)
            assert report.engines == {"e0": 0, "e1": 2}
            assert "out of memory" in report.failures["e0"]
        else:
            with pytest.raises(EngineError, match="out of memory"):
                await loop.controller.sleep(BOTH, 2)
        assert states(loop)[0] is STALE

    drive(work)


def raising(error: Exception) -> object:
    def call(*_: object) -> None:
        raise error

    return call


def test_healing_wakes_nobody() -> None:
    """It would take the memory that a trainer uses."""

    async def work(loop: Loop) -> None:
        async def respawn(_: str) -> None:
            raise AssertionError

        controller = loop.controller
        healer = Healer(CONFIG, loop.fleet, controller, respawn, lambda _: False, respawn)
        await controller.connect()
        await controller.update(1)
        await controller.sleep(["e1"], 2)
        healer.engine_failed("e1", EngineError("e1", "move", "it had failed before"))
        while healer.busy():
            await asyncio.sleep(0.01)
        assert states(loop) == [SERVING, ASLEEP]
        assert loop.fleet.engines["e1"].attached

    drive(work, replace(CONFIG, heal_attempts=1))
