"""A fleet without Ray: every member is a plain process that dials the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from tests.fleets.processes import Processes
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.errors import WeightSyncError

CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), connect_timeout_s=patient(60))


def run(test: Callable[[Processes], Coroutine[object, object, None]]) -> None:
    async def whole() -> None:
        fleet = Processes(CONFIG)
        try:
            await test(fleet)
        finally:
            await fleet.close()

    asyncio.run(whole())


def state(fleet: Processes, name: str) -> EngineState:
    return fleet.fleet.engines[name].record.state


@pytest.mark.faults
def test_versions_and_bytes_are_right_through_kills_a_refill_and_a_lost_connection() -> None:
    async def test(fleet: Processes) -> None:
        for version in (1, 2, 3):
            await fleet.update(version)
            assert [each.record.version for each in fleet.fleet.engines.values()] == [version, version]

        fleet.kill("engine 1")
        await fleet.update(4)
        assert state(fleet, "e1") is EngineState.DEAD
        fleet.engines["e1"] = fleet.start("engine", 1)
        fleet.fleet.engines["e1"] = EngineMember(fleet.engines["e1"], (3,))
        await fleet.controller.adopt("e1")
        report = await fleet.controller.refill("e1")
        assert report.bytes_from
        assert await fleet.holds("e1") == fleet.trained
        assert (state(fleet, "e1"), await fleet.engines["e1"].serving()) == (EngineState.SERVING, 4)

        fleet.cut("engine 0")
        await fleet.update(5)
        assert [each.record.version for each in fleet.fleet.engines.values()] == [5, 5]

        fleet.kill("holder 2")
        with pytest.raises(WeightSyncError, match="holder 2"):
            await fleet.update(6)
        assert not fleet.controller.connected
        fleet.holders[2] = fleet.start("holder", 2)
        await fleet.update(7)
        assert [each.record.version for each in fleet.fleet.engines.values()] == [7, 7]

    run(test)
