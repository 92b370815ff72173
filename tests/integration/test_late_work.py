"""Work that was given up and goes on, and answers that were lost: what comes after them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import DeadlineError, EngineError, StateError, TransportError
from weightsync.plan import Plan
from weightsync.protocol.messages import Forward, Prepared, Snapshot


def test_a_load_that_goes_on_after_its_engine_was_connected_again_spoils_no_verified_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightsync.channel.feed.END_S", 0.1)
    monkeypatch.setattr("weightsync.driver.engine_group.GRACE_S", 0.1)

    async def work(loop: Loop) -> None:
        may_go, is_late = threading.Event(), threading.Event()
        engine, controller = loop.engines["e1"], loop.controller

        def wait_once(name: str) -> None:
            if not is_late.is_set():
                is_late.set()
                assert may_go.wait(patient(30))

        await controller.connect()
        await controller.update(1)
        loop.train()
        engine.on_write = wait_once
        assert (await controller.update(2)).engines == {"e0": 2, "e1": 0}
        loop.train()
        await controller.connect()
        report = await controller.update(3)
        may_go.set()
        await asyncio.to_thread(engine.close)  # waits for the load
        for name, version in report.engines.items():
            assert version != 3 or loop.holds_the_models_weights(name)
        assert report.engines == {"e0": 3, "e1": 0}
        assert "reading of bucket 0" in report.failures["e1"]

    drive(work, replace(CONFIG, timeout_s=patient(0.25)))


def test_an_engine_whose_refill_does_not_stop_takes_no_part_in_an_update_that_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightsync.channel.feed.END_S", 0.1)

    async def work(loop: Loop) -> None:
        may_go, is_late = threading.Event(), threading.Event()
        engine, controller = loop.engines["e1"], loop.controller

        def wait(name: str) -> None:
            is_late.set()
            assert may_go.wait(patient(30))

        await controller.connect()
        await controller.update(1)
        engine.on_write = wait
        refilling = asyncio.ensure_future(controller.refill("e1"))
        assert await asyncio.to_thread(is_late.wait, patient(20))
        loop.train()
        async with controller.exclusive():
            await controller.connect()
            report = await controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0}
        may_go.set()
        with pytest.raises(GaveWayError):
            await refilling
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE
        async with controller.exclusive():
            await controller.connect()
            assert (await controller.update(3)).engines == {"e0": 3, "e1": 3}
        assert loop.holds_the_models_weights("e1")

    drive(work, replace(CONFIG, timeout_s=patient(0.5)))


def test_an_engine_whose_late_refill_ends_while_the_fleet_connects_takes_part_in_the_update() -> None:
    async def work(loop: Loop) -> None:
        may_go, is_late = threading.Event(), threading.Event()
        engine, controller = loop.engines["e1"], loop.controller

        def wait(name: str) -> None:
            is_late.set()
            assert may_go.wait(patient(30))

        await controller.connect()
        await controller.update(1)
        engine.on_write = wait
        refilling = asyncio.ensure_future(controller.refill("e1"))
        assert await asyncio.to_thread(is_late.wait, patient(20))
        loop.train()
        async with controller.exclusive():
            may_go.set()
            await asyncio.wait([refilling])
            await controller.connect()
            assert (await controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e1")

    drive(work, replace(CONFIG, timeout_s=patient(0.5)))


def test_after_a_connect_that_failed_an_engine_is_connected_alone_before_it_is_filled() -> None:
    async def work(loop: Loop) -> None:
        controller, prepare = loop.controller, loop.holders[2].prepare
        await controller.connect()
        await controller.update(1)

        def fail(plan: Plan, index: int, source: str) -> Prepared:
            raise TransportError("no memory")

        loop.holders[2].prepare = fail  # type: ignore[method-assign]
        with pytest.raises(TransportError, match="no memory"):
            await controller.connect()
        loop.holders[2].prepare = prepare  # type: ignore[method-assign]
        with pytest.raises(StateError, match="no holder keeps the committed version"):
            await controller.refill("e0")
        await controller.adopt("e0")
        await controller.refill("e0")
        assert loop.holds_the_models_weights("e0")

    drive(work)


def test_a_holder_that_is_busy_for_longer_than_the_driver_waits_writes_nothing_later() -> None:
    async def work(loop: Loop) -> None:
        may_go, is_writing = threading.Event(), threading.Event()

        def wait(name: str) -> None:
            is_writing.set()
            assert may_go.wait(patient(30))

        await loop.controller.connect()
        loop.engines["e1"].on_write = wait
        updating = asyncio.ensure_future(loop.controller.update(1))
        assert await asyncio.to_thread(is_writing.wait, patient(20))
        refill = partial(loop.holders[2].refill, 9, Snapshot(1, "", {}), True, 0.1, 0.1)
        with pytest.raises(DeadlineError, match=r"refill: no answer within 0.1 s from holder 2"):
            await asyncio.to_thread(refill)
        move = partial(loop.holders[2].move, 9, Forward(), 0.1)
        with pytest.raises(DeadlineError, match=r"move: no answer within 0.1 s from holder 2"):
            await asyncio.to_thread(move)
        may_go.set()
        assert (await updating).engines == {"e0": 1, "e1": 1}

    drive(work)


@contextmanager
def lost_answers(loop: Loop) -> Iterator[None]:
    """Engines resume, and their answers do not arrive."""

    def lost(resume: Callable[[int], None], version: int) -> None:
        resume(version)
        raise EngineError("", "resume", "the answer is lost")

    with ExitStack() as patches:
        for engine in loop.engines.values():
            patches.enter_context(mock.patch.object(engine, "resume", partial(lost, engine.resume)))
        with pytest.raises(EngineError, match="the answer is lost"):
            yield


def test_a_version_whose_commit_no_engine_answered_is_not_given_to_other_weights() -> None:
    async def work(loop: Loop) -> None:
        controller = loop.controller
        await controller.connect()
        with lost_answers(loop):
            await controller.update(1)
        assert (controller.version, controller.newest) == (0, 1)
        assert (await controller.update(1)).engines == {"e0": 1, "e1": 1}
        with lost_answers(loop):
            await controller.update(2)
        loop.train()
        with pytest.raises(StateError, match="may serve other weights as version 2"):
            await controller.update(2)
        assert (await controller.update(controller.newest + 1)).engines == {"e0": 3, "e1": 3}

    drive(work)
