"""Which sources fill an engine: of its own host first, once over a link to a host, others in reserve."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.hosts_fleet import Hosts, drive
from tests.live_fleet import CONFIG, THREE, commit, flat, lose, when_filled
from weightsync.driver.engine_state import EngineState
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import ReadError


async def join(loop: Hosts, *names: str, on: str) -> None:
    """Replace each engine by a new one on host `on`, which is connected but holds no weights yet."""
    for name in names:
        loop.respawn(name, on=on)
        await loop.controller.adopt(name)


def test_of_two_that_join_a_host_at_once_the_second_reads_from_the_first() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2", "e3", on="d")
        reports = await asyncio.gather(*(loop.controller.refill(name) for name in ("e1", "e2", "e3")))
        assert [loop.wrong(name) for name in ("e1", "e2", "e3")] == [[], [], []]
        assert [report.bytes_from.keys() for report in reports] == [{"holder 1"}, {"holder 5"}, {"holder 5"}]

    drive(work, "a", {"e0": "b", "e1": "b", "e2": "b", "e3": "b"}, CONFIG)


def test_if_the_first_of_a_host_fails_the_second_reads_over_the_link() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2", on="d")
        when_filled(loop.holders[4], lambda: loop.holders[4].stop_refill("given up"))
        first, second = await asyncio.gather(
            *(loop.controller.refill(name) for name in ("e1", "e2")), return_exceptions=True
        )
        assert "given up" in str(first)
        assert not isinstance(second, BaseException)
        assert second.bytes_from.keys() == {"holder 1"}
        assert loop.wrong("e2") == []

    drive(work, "a", {"e0": "b", "e1": "b", "e2": "b"}, CONFIG)


def test_one_that_waits_for_another_and_takes_an_update_is_not_filled_again() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        for name in ("e1", "e2"):
            await lose(loop, name)
        reading, events = asyncio.Event(), asyncio.get_running_loop()
        when_filled(loop.holders[2], lambda: events.call_soon_threadsafe(reading.set))
        refills = [asyncio.ensure_future(loop.controller.refill(name)) for name in ("e1", "e2")]
        await reading.wait()
        async with loop.controller.exclusive():
            await loop.update(2)
        _, second = await asyncio.gather(*refills, return_exceptions=True)
        assert isinstance(second, GaveWayError)
        assert "engine e2 got version 2" in str(second)

    drive(work, "a", {"e0": "b", "e1": "c", "e2": "c"}, CONFIG)


def test_engines_on_different_hosts_do_not_wait_for_each_other() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        for name, host in (("e1", "d"), ("e2", "e")):
            await join(loop, name, on=host)
        second = asyncio.Event()
        events = asyncio.get_running_loop()

        def until_the_other_serves() -> None:
            asyncio.run_coroutine_threadsafe(second.wait(), events).result(CONFIG.timeout_s)

        when_filled(loop.holders[4], until_the_other_serves)
        first = asyncio.ensure_future(loop.controller.refill("e1"))
        await loop.controller.refill("e2")
        second.set()
        await first

    drive(work, "a", {"e0": "b", "e1": "b", "e2": "b"}, CONFIG)


def test_a_source_of_the_same_host_that_dies_in_mid_read_is_replaced_from_another() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e2", on="b")
        when_filled(loop.holders[4], loop.holders[1].drop_engine, piece=4)  # as when its process is lost
        report = await loop.controller.refill("e2")
        assert report.bytes_from.keys() == {"holder 1", "holder 2"}
        assert sum(report.bytes_from.values()) >= flat(loop.holders[4]).nbytes
        assert loop.wrong("e2") == []

    drive(work, "a", THREE, CONFIG, hidden=240)


def test_a_source_of_the_same_host_is_replaced_by_copies_too() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert [i for i, holder in enumerate(loop.holders) if holder.snapshots()] == [1]
        await join(loop, "e2", on="c")
        when_filled(loop.holders[4], loop.holders[2].drop_engine, piece=4)
        report = await loop.controller.refill("e2")
        assert report.bytes_from.keys() == {"holder 2", "holder 1"}
        assert loop.wrong("e2") == []

    drive(work, "a", THREE, replace(CONFIG, keep_versions=2, mirrors=0), hidden=240)


@pytest.mark.parametrize("mode", ["broadcast", "auto"])
def test_engines_that_take_broadcasts_from_host_memory_are_sources(mode: str) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert not any(holder.snapshots() for holder in loop.holders)
        await lose(loop, "e2")
        report = await loop.controller.refill("e2")
        assert loop.wrong("e2") == []
        assert report.bytes_from.keys() == {"holder 1", "holder 2"}
        await loop.update(2)

    drive(work, "a", THREE, replace(CONFIG, mode=mode), trainers_on="")


def test_of_copies_of_broadcasts_and_engines_the_more_hosts_are_read() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert [i for i, holder in enumerate(loop.holders) if holder.snapshots()] == [0]
        await lose(loop, "e2")
        assert (await loop.controller.refill("e2")).bytes_from.keys() == {"holder 1", "holder 2"}
        await lose(loop, "e1")
        await lose(loop, "e2")  # one host each, and reading copies disturbs no engine
        assert (await loop.controller.refill("e2")).bytes_from.keys() == {"holder 0"}
        assert loop.wrong("e2") == []

    drive(work, "a", THREE, replace(CONFIG, keep_versions=2, mirrors=0), trainers_on="")


def test_ranks_read_their_own_parts_from_an_engine_where_each_would_read_all_copies() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        report = await loop.controller.refill("e1")
        assert loop.wrong("e1") == []
        assert report.bytes_from == {f"holder {i}": flat(loop.holders[i]).nbytes for i in (1, 2)}

    config = replace(CONFIG, keep_versions=2, mirrors=0)
    drive(work, "a", {"e0": "bb", "e1": "cc"}, config, trainers_on="")


def test_without_another_host_the_lost_source_is_named() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", on="b")
        when_filled(loop.holders[3], loop.holders[1].drop_engine, piece=2)
        with pytest.raises(ReadError, match="holder 1"):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)
