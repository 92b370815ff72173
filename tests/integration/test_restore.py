"""A second controller goes on with the holders and engines that the first one left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.driver.updating.controller import Controller
from weightsync.errors import TransportError
from weightsync.testing import LocalEngine


class Left(Loop):
    """After version 2, its first controller vanishes."""

    async def until_version_2(self) -> None:
        await self.controller.connect()
        for version in (1, 2):
            self.train()
            await self.controller.update(version)
            await self.controller.snapshot_index.settled()

    async def next_controller(self) -> Controller:
        for name, engine in self.engines.items():
            self.fleet.engines[name] = EngineMember(LocalEngine(engine), self.fleet.engines[name].holders)
        controller = Controller(CONFIG, self.fleet)
        await controller.connect()
        return controller


DRIVER = "weightsync.driver"
Work = Callable[[Left], Coroutine[object, object, None]]


def drive_left(work: Work) -> None:
    drive(work, cls=Left)  # type: ignore[arg-type]


def test_what_serves_the_committed_version_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, DRIVER)

    async def work(loop: Left) -> None:
        await loop.until_version_2()
        writes: list[str] = []
        for engine in loop.engines.values():
            engine.on_write = writes.append
        caplog.clear()
        controller = await loop.next_controller()
        assert await controller.restore() == []
        lines = [record.getMessage() for record in caplog.records if record.name == DRIVER]
        connected, took_over = (line for line in lines if "connected: " in line or "took over" in line)
        assert connected.startswith("[driver] connected: "), "engines do not serve version 0"
        assert took_over.startswith("[driver · v2] took over")
        assert controller.version == 2
        assert controller.can_refill("e1")
        assert [member.record.state for member in loop.fleet.engines.values()] == [EngineState.SERVING] * 2
        assert writes == []
        loop.train()
        assert (await controller.update(3)).engines == {"e0": 3, "e1": 3}
        assert loop.holds_the_models_weights("e1")

    drive_left(work)


@pytest.mark.parametrize("older", [True, False])
def test_what_is_paused_or_serves_another_version_is_stale_and_refilled(older: bool) -> None:
    async def work(loop: Left) -> None:
        await loop.until_version_2()
        engine = loop.engines["e1"]
        engine.pause("keep", 1)
        for tensor in engine.tensors.values():
            tensor.fill_(7)
        if older:
            engine.resume(1)
        controller = await loop.next_controller()
        assert await controller.restore() == ["e1"]
        assert controller.version == 2
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE
        report = await controller.refill("e1")
        assert report.verified
        assert report.engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e1")
        assert engine.serving() == 2

    drive_left(work)


def test_a_version_that_is_served_but_not_kept_has_committed() -> None:
    async def work(loop: Left) -> None:
        await loop.until_version_2()

        def snapshot(*_: object) -> None:
            raise TransportError("the driver died before")

        loop.holders[0].snapshot = snapshot  # type: ignore[assignment, method-assign]
        loop.train()
        await loop.controller.update(3)
        await loop.controller.snapshot_index.settled()
        loop.engines["e1"].pause("keep", 1)
        controller = await loop.next_controller()
        assert await controller.restore() == ["e1"]
        assert controller.version == 3
        assert not controller.can_refill("e1")
        loop.train()
        assert (await controller.update(4)).engines == {"e0": 4, "e1": 4}

    drive_left(work)


def test_nobody_serves_and_nobody_keeps_before_the_first_version() -> None:
    async def work(loop: Left) -> None:
        await loop.controller.connect()
        controller = await loop.next_controller()
        assert await controller.restore() == []
        assert controller.version == 0
        assert (await controller.update(1)).engines == {"e0": 1, "e1": 1}

    drive_left(work)


def test_what_is_kept_by_another_plan_is_of_no_use() -> None:
    async def work(loop: Left) -> None:
        await loop.until_version_2()
        for engine in loop.engines.values():
            engine.pause("keep", 1)
        loop.fleet.engines = {
            name: EngineMember(LocalEngine(engine), loop.fleet.engines[name].holders)
            for name, engine in loop.engines.items()
        }
        controller = Controller(replace(CONFIG, bucket_bytes=8192), loop.fleet)
        await controller.connect()
        assert await controller.restore() == []
        assert controller.version == 0

    drive_left(work)
