"""Holders allocate memory for copies after a connect, and nobody but a copy waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fleets.loop import CONFIG, Loop, drive
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import FlatLayout
from weightsync.driver.engine_state import EngineState
from weightsync.driver.events import HolderSilent
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import PeerLostError, StateError

THERE = "memory for copies is there after"
SHORT = replace(CONFIG, timeout_s=patient(0.5))


class Slow(Loop):
    """The trainer's holder allocates only once it may. `called` has what it is asked to do."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.called: list[str] = []
        self.begun, self.may = threading.Event(), threading.Event()
        holder = self.holders[0]
        reserve, snapshot, prepare = holder.reserve, holder.snapshot, holder.prepare

        def reserve_late(part: int, is_flat: bool) -> object:
            self.called.append("reserve")
            self.begun.set()
            assert self.may.wait(patient(20))
            self.called.append("reserved")
            return reserve(part, is_flat)

        def noted(name: str, method: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                self.called.append(name)
                return method(*args)

            return call

        holder.reserve = reserve_late  # type: ignore[assignment, method-assign]
        holder.snapshot = noted("snapshot", snapshot)  # type: ignore[assignment, method-assign]
        holder.prepare = noted("prepare", prepare)  # type: ignore[assignment, method-assign]

    def close(self) -> None:
        self.may.set()
        super().close()

    async def connected(self) -> None:
        """Connect. The holder allocates when this returns."""
        await self.controller.connect()
        assert await asyncio.to_thread(self.begun.wait, patient(10))

    def kept(self) -> list[int]:
        """The versions of which this holder has a copy."""
        return [part.header.version for part in self.holders[0].snapshots()]


Work = Callable[[Slow], Coroutine[object, object, None]]


def drive_slow(work: Work, config: SyncConfig = CONFIG) -> None:
    async def work_and_free(loop: Slow) -> None:
        try:
            await work(loop)
        finally:
            loop.may.set()  # or a test that fails would wait for the holder

    drive(work_and_free, config, cls=Slow)  # type: ignore[arg-type]


def test_a_version_is_served_before_its_memory_is_there_and_then_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "weightsync")

    async def work(loop: Slow) -> None:
        await loop.connected()
        loop.train()
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 1}
        assert "reserve" not in report.connect_phases
        refilling = asyncio.create_task(loop.controller.refill("e1"))
        settling = asyncio.create_task(loop.controller.snapshot_index.settled())
        done, _ = await asyncio.wait([settling, refilling], timeout=0.1)
        assert not done
        assert THERE not in caplog.text
        assert loop.called == ["prepare", "reserve"], "or its copy would allocate, too"
        assert not loop.controller.can_refill("e1")
        loop.may.set()
        await settling
        assert loop.called == ["prepare", "reserve", "reserved", "snapshot"]
        assert caplog.text.count(THERE) == 1
        assert loop.kept() == [1]
        assert (await refilling).verified

    drive_slow(work)


def test_no_update_waits_for_memory_and_the_newest_version_is_copied_once_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "weightsync")

    async def work(loop: Slow) -> None:
        await loop.connected()
        for version in (1, 2, 3):
            loop.train()
            report = await asyncio.wait_for(loop.controller.update(version), patient(5))
            assert report.engines == {"e0": version, "e1": version}
            assert loop.called == ["prepare", "reserve"]
        for version in (1, 2):
            assert f"v{version}] holders keep no copy of it: memory for it is not there yet" in caplog.text
        loop.may.set()
        await loop.controller.snapshot_index.settled()
        assert loop.called == ["prepare", "reserve", "reserved", "snapshot"]
        assert loop.kept() == [3]
        loop.controller.engine_group.enter(["e1"], EngineState.STALE)
        assert (await loop.controller.refill("e1")).verified
        assert loop.holds_the_models_weights("e1")
        await loop.controller.update(4)
        await loop.controller.snapshot_index.settled()
        assert loop.kept() == [4]

    drive_slow(work)


def test_an_update_waits_for_a_copy_that_has_begun() -> None:
    async def work(loop: Slow) -> None:
        loop.may.set()
        await loop.connected()
        await loop.controller.snapshot_index.settled()
        holder, begun, may = loop.holders[0], threading.Event(), threading.Event()
        snapshot = holder.snapshot

        def late(*args: object) -> object:
            begun.set()
            assert may.wait(patient(20))
            return snapshot(*args)  # type: ignore[arg-type]

        holder.snapshot = late  # type: ignore[assignment, method-assign]
        await loop.controller.update(1)
        assert await asyncio.to_thread(begun.wait, patient(10))
        updating = asyncio.create_task(loop.controller.update(2))
        done, _ = await asyncio.wait([updating], timeout=0.1)
        assert not done
        may.set()
        assert (await updating).engines == {"e0": 2, "e1": 2}

    drive_slow(work)


@pytest.mark.parametrize("copies", [[], ["snapshot"]])
def test_a_fleet_connects_again_once_memory_is_there_and_its_version_copied(copies: list[str]) -> None:
    async def work(loop: Slow) -> None:
        await loop.connected()
        if copies:
            await loop.controller.update(1)
        connecting = asyncio.create_task(loop.controller.connect())
        done, _ = await asyncio.wait([connecting], timeout=0.1)
        assert not done
        loop.may.set()
        await connecting
        before = ["prepare", "reserve", "reserved", *copies]
        assert loop.called[: len(before) + 1] == [*before, "prepare"]
        await loop.controller.snapshot_index.settled()
        assert loop.kept() == [1 for _ in copies]
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive_slow(work)


def test_a_holder_that_never_gets_its_memory_does_not_keep_a_fleet_from_connecting_again() -> None:
    async def work(loop: Slow) -> None:
        await loop.connected()
        began = time.monotonic()
        await loop.controller.connect()
        assert time.monotonic() - began < SHORT.connect_timeout_s
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}
        loop.may.set()
        await loop.controller.snapshot_index.settled()
        assert loop.kept() == [1]

    drive_slow(work, SHORT)


@pytest.mark.parametrize("num_versions", [0, 1])
def test_nothing_is_left_of_a_driver_that_leaves_meanwhile(num_versions: int) -> None:
    async def work(loop: Slow) -> None:
        before = asyncio.all_tasks()
        await loop.connected()
        for version in range(1, num_versions + 1):
            await loop.controller.update(version)
        await loop.controller.snapshot_index.stop()
        assert asyncio.all_tasks() == before
        loop.may.set()

    drive_slow(work)


@pytest.mark.parametrize("error", [StateError("no memory"), PeerLostError("holder 0", "it ended")])
def test_memory_that_a_holder_does_not_get_is_no_error_of_connecting(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(loop: Loop) -> None:
        silent: list[HolderSilent] = []
        loop.controller.events.subscribe(HolderSilent, silent.append)

        def reserve(*_: object) -> None:
            raise error

        loop.holders[0].reserve = reserve  # type: ignore[assignment, method-assign]
        await loop.controller.connect()
        await loop.controller.snapshot_index.settled()
        assert f"not every holder can keep versions: {error}" in caplog.text
        assert len(silent) == isinstance(error, PeerLostError)
        assert THERE not in caplog.text

    caplog.set_level(logging.INFO, "weightsync")
    drive(work)


def test_a_bug_in_the_background_is_logged_and_copies_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Loop) -> None:
        def reserve(*_: object) -> None:
            raise RuntimeError("a bug")

        loop.holders[0].reserve = reserve  # type: ignore[assignment, method-assign]
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        assert "RuntimeError('a bug')" in caplog.text
        assert loop.controller.can_refill("e1")

    drive(work)


def test_a_refill_that_waited_for_a_connect_does_not_keep_updates_waiting_for_memory() -> None:
    async def work(loop: Slow) -> None:
        loop.may.set()
        await loop.connected()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        loop.controller.engine_group.enter(["e1"], EngineState.STALE)
        async with loop.controller.exclusive():
            refilling = asyncio.create_task(loop.controller.refill("e1"))
            await asyncio.wait([refilling], timeout=0.1)
            loop.begun.clear()
            loop.may.clear()
            await loop.connected()
        with pytest.raises(GaveWayError, match="connected again"):
            await refilling
        loop.may.set()
        assert (await loop.controller.refill("e1")).verified

    drive_slow(work)


def test_an_engine_that_leaves_meanwhile_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightsync")
    mapped: list[int] = []

    async def work(loop: Slow) -> None:
        loop.may.set()
        await loop.connected()
        await loop.controller.snapshot_index.ended()
        layouts = dict.fromkeys(loop.engines, FlatLayout("the model's", 0))
        connection = replace(loop.controller.connection(), in_place=True, flat_layouts=layouts)
        reserve = loop.holders[1].reserve

        def reserve_late(part: int, is_flat: bool) -> object:
            loop.begun.set()
            assert loop.may.wait(patient(20))
            return reserve(part, is_flat)

        loop.holders[1].reserve = reserve_late  # type: ignore[assignment, method-assign]
        loop.holders[1].staging.mapped = SimpleNamespace(flat=SimpleNamespace(nbytes=100))  # type: ignore[union-attr, assignment]
        loop.holders[2].map = mapped.append  # type: ignore[assignment, method-assign]
        loop.begun.clear()
        loop.may.clear()
        caplog.clear()
        loop.controller.snapshot_index.reserve(connection)
        assert await asyncio.to_thread(loop.begun.wait, patient(10))
        del loop.fleet.engines["e1"]
        loop.may.set()
        await loop.controller.snapshot_index.settled()
        assert [[*offers] for offers in mapped] == [[0]], "as the fleet was when they began"
        assert THERE in caplog.text
        assert [each.message for each in caplog.records if each.levelno > logging.INFO] == []

    drive_slow(work)
