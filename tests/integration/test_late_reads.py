"""Direct reads of an engine that joins are planned once it serves, and before the next update."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from tests.hosts_fleet import Hosts, Staging, drive
from tests.live_fleet import CONFIG, commit, lose
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import EngineFailed
from weightsync.errors import ConfigError, StateError, TransportError

NEAR = {"e0": "a", "e1": "a"}
"""Two engines on the trainer's host. Their holders are numbers 1 and 2."""


class Gate:
    """Holds a holder's `route` until it is opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.opened, self.calls, self._error = threading.Event(), threading.Event(), 0, error

    def __call__(self, *_: object) -> None:
        self.calls += 1
        self.begun.set()
        assert self.opened.wait(patient(30))
        if self._error:
            raise self._error

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, patient(30))


@contextmanager
def gated(loop: Hosts, error: Exception | None = None) -> Iterator[Gate]:
    """Hold the planning of reads by holder 2, which then fails with `error`, if that is given."""
    gate, route = Gate(error), Staging.route

    def gated_route(staging: Staging, *args: object) -> None:
        if staging is loop.holders[2].staging:
            gate()
        route(staging, *args)  # type: ignore[arg-type]

    with mock.patch.object(Staging, "route", gated_route):
        try:
            yield gate
        finally:
            gate.opened.set()


async def eventually(loop: Hosts, name: str) -> str:
    """Return the route of engine `name` once it is planned."""
    router = loop.controller.connection().router
    deadline = time.monotonic() + patient(30)
    while router.joining(name):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return router.routes[name]


def test_an_engine_serves_before_its_reads_are_planned() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with gated(loop) as gate:
            await lose(loop, "e1")
            report = await loop.controller.refill("e1")
            assert (report.states["e1"], report.engines["e1"]) == ("SERVING", 1)
            assert report.routes["e1"] == "it has joined, and its reads are planned before the next update"
            assert loop.wrong("e1") == []
            await gate.reached()
        assert await eventually(loop, "e1") == "direct"
        assert await loop.update(2) == {"e0": "direct", "e1": "direct"}
        assert gate.calls == 1

    drive(work, "a", NEAR, CONFIG)


def test_an_update_waits_for_reads_that_are_being_planned() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with gated(loop) as gate:
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            await gate.reached()
            updating = asyncio.create_task(exclusively(loop, 2))
            await asyncio.sleep(0.2)
            assert loop.fleet.engines["e0"].record.state is EngineState.SERVING, "none is paused yet"
            gate.opened.set()
            assert await updating == {"e0": "direct", "e1": "direct"}
        assert gate.calls == 1

    drive(work, "a", NEAR, CONFIG)


async def exclusively(loop: Hosts, version: int) -> dict[str, str]:
    async with loop.controller.exclusive():
        return dict(await loop.update(version))


def test_an_update_plans_what_nobody_has_begun_to_plan() -> None:
    """It comes between the adoption of an engine and its refill."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        assert loop.controller.can_refill("e1")
        assert loop.controller.connection().router.joining("e1")
        assert await exclusively(loop, 2) == {"e0": "direct", "e1": "direct"}

    drive(work, "a", NEAR, CONFIG)


def test_reads_are_planned_at_once_if_no_refill_follows() -> None:
    async def work(loop: Hosts) -> None:
        await loop.controller.connect()
        loop.respawn("e1")
        await loop.controller.adopt("e1")
        assert await eventually(loop, "e1") == "direct"
        assert await exclusively(loop, 1) == {"e0": "direct", "e1": "direct"}

    drive(work, "a", NEAR, CONFIG)


def test_an_update_goes_on_without_an_engine_whose_holder_hangs_and_that_is_healed_then() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        failed: list[EngineFailed] = []
        loop.controller.events.subscribe(EngineFailed, failed.append)
        with gated(loop) as gate:
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            await gate.reached()
            async with loop.controller.exclusive():
                loop.train()
                report = await loop.controller.update(2)
            assert (report.engines, report.states) == (
                {"e0": 2, "e1": 1},
                {"e0": "SERVING", "e1": "SERVING"},
            )
            assert failed == []
        await eventually(loop, "e1")
        async with loop.controller.update_lock.shared("e1"):
            (event,) = failed
        assert event.name == "e1"
        assert isinstance(event.error, StateError)
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE
        await loop.controller.snapshot_index.settled()
        await loop.controller.adopt("e1")
        await loop.controller.refill("e1")
        assert loop.wrong("e1") == []
        assert await exclusively(loop, 3) == {"e0": "direct", "e1": "direct"}

    drive(work, "a", NEAR, CONFIG)


def test_an_engine_whose_reads_cannot_be_planned_takes_broadcasts(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with gated(loop, TransportError("no peer access")) as gate, caplog.at_level(logging.INFO):
            gate.opened.set()
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            assert await eventually(loop, "e1") == "no peer access"
            assert "[engine e1] takes broadcasts: no peer access" in caplog.text
            routes = await exclusively(loop, 2)
        assert (routes["e0"], routes["e1"]) == ("direct", "no peer access")
        assert gate.calls == 1

    drive(work, "a", {**NEAR, "e2": "a"}, CONFIG, alone=["e2"])


def test_without_buckets_the_next_update_connects_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        epoch = loop.controller.connection().plan.epoch
        with gated(loop, TransportError("no peer access")) as gate, caplog.at_level(logging.WARNING):
            gate.opened.set()
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            assert await eventually(loop, "e1") == "no peer access"
        assert "[engine e1] the next update connects the fleet again: no peer access" in caplog.text
        assert loop.wrong("e1") == [], "it serves"
        assert await exclusively(loop, 2) == {"e0": "direct", "e1": "direct"}
        assert loop.controller.connection().plan.epoch == epoch + 1

    drive(work, "a", NEAR, CONFIG)


def test_an_engine_that_must_read_directly_and_cannot_is_dead() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        failed: list[EngineFailed] = []
        loop.controller.events.subscribe(EngineFailed, failed.append)
        with gated(loop, TransportError("no peer access")) as gate:
            gate.opened.set()
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            await eventually(loop, "e1")
        (event,) = failed
        assert event.name == "e1"
        assert isinstance(event.error, ConfigError)
        assert "engine e1: no peer access" in str(event.error)
        assert loop.fleet.engines["e1"].record.state is EngineState.DEAD
        loop.train()
        report = await loop.controller.update(2)
        assert (report.engines["e0"], report.states["e1"]) == (2, "DEAD")

    drive(work, "a", NEAR, replace(CONFIG, mode="direct"))


def test_an_engine_is_removed_once_its_reads_are_planned_and_its_name_is_free() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with gated(loop) as gate:
            await lose(loop, "e1")
            await loop.controller.refill("e1")
            await gate.reached()
            removing = asyncio.create_task(removed(loop, "e1"))
            await asyncio.sleep(0.1)
            assert not removing.done()
            gate.opened.set()
            member = await removing
        assert loop.controller.connection().router.routes["e1"] == "direct"
        loop.fleet.engines["e1"] = member
        await lose(loop, "e1")
        await loop.controller.refill("e1")
        assert await eventually(loop, "e1") == "direct"
        assert await exclusively(loop, 2) == {"e0": "direct", "e1": "direct"}

    drive(work, "a", NEAR, CONFIG)


async def removed(loop: Hosts, name: str) -> object:
    """Remove an engine, as `Membership.part` does."""
    async with loop.controller.update_lock.shared(name):
        return loop.fleet.engines.pop(name)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_no_reads_are_planned_of_an_engine_that_left_before(is_replaced: bool) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with gated(loop) as gate:
            gate.opened.set()
            await lose(loop, "e1")
            async with loop.controller.update_lock.shared("e1"):
                refilling = asyncio.create_task(loop.controller.refill("e1"))
                await asyncio.sleep(0)
                member = loop.fleet.engines.pop("e1")
                if is_replaced:
                    loop.fleet.engines["e1"] = replace(member, attached=False)
            with pytest.raises((KeyError, StateError)):
                await refilling
            async with loop.controller.update_lock.shared("e1"):
                assert gate.calls == 0
            loop.train()
            report = await loop.controller.update(2)
        assert report.engines["e0"] == 2
        assert gate.calls == 0

    drive(work, "a", NEAR, CONFIG)
