"""Engines that serve the committed version fill others: real holders, and doubles of mapped memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.hosts_fleet import Hosts, drive
from tests.live_fleet import CONFIG, THREE, commit, flat, lose, when_filled
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.driver.healing.healing import Healer
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import (
    PeerLostError,
    ReadError,
    StateError,
    TransportError,
    VerifyError,
    WeightSyncError,
)
from weightsync.holder.holder import Holder
from weightsync.holder.refill import Refill
from weightsync.holder.snapshots import HEADER_NBYTES
from weightsync.memory.host import SharedBuffer
from weightsync.plan.broadcast.plan import Portion
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Snapshot, SnapshotHeader
from weightsync.readers import Read, open_reader
from weightsync.testing import LocalPeer


@contextmanager
def header_of(offer: Offer) -> Iterator[Callable[[], bytes]]:
    """Yield what reads the header behind `offer`, over one connection."""
    target = SharedBuffer.create(HEADER_NBYTES)
    reader = open_reader([target], {"source": offer})
    try:

        def read() -> bytes:
            reader.read([Read("source", 0, 0, 0, HEADER_NBYTES)], patient(10))
            return bytes(target.tensor.numpy())

        yield read
    finally:
        reader.close()
        target.close()


def test_an_engine_is_filled_from_one_that_serves_without_any_copy_in_host_memory() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert not any(holder.snapshots() for holder in loop.holders)
        await lose(loop, "e1")
        assert loop.controller.can_refill("e1")
        report = await loop.controller.refill("e1")
        assert report.verified
        assert report.engines == {"e0": 1, "e1": 1}
        assert loop.wrong("e1") == []
        assert report.ways == {"holder 3": "zeromq", "holder 4": "zeromq"}
        sizes = [flat(loop.holders[i]).nbytes for i in (5, 6)]
        assert report.bytes_from == {"holder 3": sizes[0], "holder 4": sizes[1]}
        await lose(loop, "e0")  # the one that was filled is a source, too
        await loop.controller.refill("e0")
        assert loop.wrong("e0") == []
        await loop.update(2)

    drive(work, "aaa", {"e0": "bb", "e1": "cc"}, CONFIG)


def test_one_that_joins_is_filled_on_a_host_of_its_own() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        loop.respawn("e1", on="d")
        await loop.controller.adopt("e1")
        assert (await loop.controller.refill("e1")).bytes_from.keys() == {"holder 1"}
        assert loop.wrong("e1") == []

    drive(work, "a", {"e0": "b", "e1": "b"}, CONFIG)


def test_an_engine_of_the_same_host_is_enough_so_that_a_byte_crosses_to_a_host_once() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        for name, source in (("e1", "holder 1"), ("e2", "holder 5"), ("e3", "holder 5")):
            loop.respawn(name, on="d")
            await loop.controller.adopt(name)
            report = await loop.controller.refill(name)
            assert report.bytes_from.keys() == {source}
            assert loop.wrong(name) == []

    drive(work, "a", {"e0": "b", "e1": "b", "e2": "b", "e3": "b"}, CONFIG)


def test_reads_are_spread_over_copies_and_engines_on_hosts_without_one() -> None:
    async def work(loop: Hosts) -> None:
        loop.holders[1].name = "holder 7"  # as of one whose place among the holders has changed
        await commit(loop)
        assert [i for i, holder in enumerate(loop.holders) if holder.snapshots()] == [1]
        await lose(loop, "e3")
        report = await loop.controller.refill("e3")
        assert loop.wrong("e3") == []
        # e1 is beside the copy. The others take turns with the pieces of the plan.
        assert report.bytes_from.keys() == {"holder 7", "holder 3"}
        assert sum(report.bytes_from.values()) == flat(loop.holders[4]).nbytes
        assert min(report.bytes_from.values()) > 0.4 * flat(loop.holders[4]).nbytes

    engines = {"e0": "b", "e1": "b", "e2": "c", "e3": "d"}
    drive(work, "a", engines, replace(CONFIG, keep_versions=2, mirrors=0))


def test_a_copy_on_the_same_host_is_enough() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e0")
        assert (await loop.controller.refill("e0")).ways == {"holder 1": "own"}
        assert loop.wrong("e0") == []

    drive(work, "a", THREE, replace(CONFIG, keep_versions=2, mirrors=0, refill="auto"))


def test_several_are_filled_at_once_and_nothing_is_served_afterwards() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        offers: list[Offer] = []
        note_offers(loop.holders[1], offers)
        for name in ("e1", "e2"):
            await lose(loop, name)
        reports = await asyncio.gather(*(loop.controller.refill(name) for name in ("e1", "e2")))
        assert [loop.wrong(name) for name in ("e1", "e2")] == [[], []]
        assert {"holder 1"} in [report.bytes_from.keys() for report in reports]
        assert offers
        await loop.controller.snapshot_index.writable()
        for offer in offers:
            with header_of(offer) as read, pytest.raises(ReadError):
                read()

    drive(work, "a", THREE, CONFIG)


def note_offers(holder: Holder, offers: list[Offer]) -> None:
    offer_live = holder.offer_live

    def noted(header: SnapshotHeader, attempt: int) -> Offer:
        offers.append(offer_live(header, attempt))
        return offers[-1]

    holder.offer_live = noted  # type: ignore[method-assign]


def test_a_source_that_dies_in_mid_read_is_replaced() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e2")
        when_filled(loop.holders[3], loop.holders[1].drop_engine, piece=4)  # as when its process is lost
        report = await loop.controller.refill("e2")
        assert report.bytes_from.keys() == {"holder 1", "holder 2"}
        assert 0 < 2 * report.bytes_from["holder 1"] < report.bytes_from["holder 2"]
        assert loop.wrong("e2") == []

    drive(work, "a", THREE, CONFIG, hidden=240)


def test_without_another_source_the_lost_one_is_named() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        when_filled(loop.holders[2], loop.holders[1].drop_engine, piece=2)
        with pytest.raises(ReadError, match="holder 1"):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_one_that_does_not_offer_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e2")
        whole = loop.fleet.holders[1]

        class Refusing(LocalPeer):
            def __getattr__(self, method: str) -> Callable[..., object]:
                return refuse if method == "offer_live" else getattr(whole, method)

        async def refuse(*_: object) -> Offer:
            raise TransportError("no port is left")

        loop.fleet.holders[1] = Refusing(loop.holders[1])
        assert (await loop.controller.refill("e2")).bytes_from.keys() == {"holder 2"}
        assert loop.wrong("e2") == []
        assert "[holder 1] does not offer its engine's memory: no port is left" in caplog.text

    drive(work, "a", THREE, CONFIG)


def test_where_no_engine_alike_serves_the_error_says_what_to_do() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e0")
        await lose(loop, "e1")
        assert not loop.controller.can_refill("e0")
        with pytest.raises(StateError, match=r"no engine alike serves it: call update_weights"):
            await loop.controller.refill("e0")
        await loop.update(2)
        await lose(loop, "e1")
        await loop.controller.connect()  # holders no longer know what they have mapped
        assert not loop.controller.can_refill("e1")

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_one_that_slept_is_no_source_until_it_took_an_update() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        async with loop.controller.exclusive():
            await loop.controller.sleep(["e0"], 1)
            await loop.controller.wake(["e0"])
        await lose(loop, "e1")
        assert not loop.controller.can_refill("e1")
        await loop.update(2)
        await lose(loop, "e1")
        assert loop.controller.can_refill("e1")

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_a_byte_that_changed_in_the_source_serves_nowhere() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        loop.engines["e0"].ranks[0].memory["norm"][0] ^= 1
        with pytest.raises(VerifyError, match="e1"):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_an_update_that_begins_during_a_refill_makes_it_give_way() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        reading, stopped = asyncio.Event(), threading.Event()
        events, stop_refill = asyncio.get_running_loop(), loop.holders[2].stop_refill

        def stop(cause: str) -> None:
            stop_refill(cause)
            stopped.set()

        def wait_for_the_update() -> None:
            events.call_soon_threadsafe(reading.set)
            assert stopped.wait(patient(20))

        loop.holders[2].stop_refill = stop  # type: ignore[method-assign]
        when_filled(loop.holders[2], wait_for_the_update)
        refill = asyncio.ensure_future(loop.controller.refill("e1"))
        await reading.wait()
        async with loop.controller.exclusive():
            await loop.update(2)
        with pytest.raises(GaveWayError):
            await refill
        assert [loop.wrong(name) for name in ("e0", "e1")] == [[], []]

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_engines_go_to_sleep_once_nobody_reads_them() -> None:
    """A refill that does not give way is left behind."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        await lose(loop, "e1")
        reading, asleep, offers = asyncio.Event(), threading.Event(), list[Offer]()
        events = asyncio.get_running_loop()

        def wait_for_the_sleep() -> None:
            events.call_soon_threadsafe(reading.set)
            assert asleep.wait(patient(30))

        note_offers(loop.holders[1], offers)
        loop.holders[2].stop_refill = lambda cause: None  # type: ignore[method-assign]
        when_filled(loop.holders[2], wait_for_the_sleep)
        refill = asyncio.ensure_future(loop.controller.refill("e1"))
        await reading.wait()
        sleep, seen = loop.engines["e0"].sleep, list[str]()

        def sleeping(level: int, mode: str, timeout_s: float) -> None:
            with header_of(offers[0]) as read:
                try:
                    read()
                except ReadError:
                    seen.append("not served")
            sleep(level, mode, timeout_s)

        loop.engines["e0"].sleep = sleeping  # type: ignore[method-assign]
        async with loop.controller.exclusive():
            await loop.controller.sleep(["e0"], 1)
        assert seen == ["not served"]
        asleep.set()
        with pytest.raises(WeightSyncError):
            await refill
        assert loop.fleet.engines["e1"].record.state is not EngineState.SERVING

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


def test_a_crashed_engine_is_healed_from_its_peer_without_any_host_memory() -> None:
    async def work(loop: Hosts) -> None:
        async def respawn(name: str) -> bool:
            loop.respawn(name)
            return True

        async def rejoin(name: str) -> None:
            raise AssertionError(f"{name} is not silent")

        await commit(loop)
        healer = Healer(CONFIG, loop.fleet, loop.controller, respawn, lambda _: True, rejoin)
        loop.controller.engine_group.lost("e1", PeerLostError("engine e1", "it was killed"))
        while healer.busy():
            await asyncio.sleep(0.01)
        (heal,) = healer.heals
        assert (heal.engine, heal.version, heal.verified) == ("e1", 1, True)
        assert heal.bytes_from.keys() == {"holder 1"}
        assert loop.wrong("e1") == []

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


class Sink:
    """Takes the pieces of a flat snapshot one by one. `act` is called once, before the second is read."""

    def __init__(self, nbytes: int, act: Callable[[], None]) -> None:
        self.targets = [SharedBuffer.create(nbytes // 4)]
        self._nbytes, self._act, self.num_landed, self.finished = nbytes // 4, act, 0, False

    num_buckets = 4

    def portions(self, bucket: int) -> Sequence[Portion]:
        return [Portion(0, bucket * self._nbytes, 0, self._nbytes)]

    def wait_free(self, bucket: int) -> None:
        if bucket == 1:
            self._act()

    def land(self, bucket: int) -> None:
        self.num_landed += 1

    def finish(self) -> None:
        self.finished = True


def test_a_reader_that_goes_on_while_its_source_is_written_is_told() -> None:
    """As a refill that does not stop for an update: it may have read bytes of both versions."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        reading, written = asyncio.Event(), threading.Event()
        events = asyncio.get_running_loop()

        def wait_for_the_update() -> None:
            events.call_soon_threadsafe(reading.set)
            assert written.wait(patient(30))

        offer = loop.holders[1].offer_live(SnapshotHeader(1, "layout", 0), 100)
        sink = Sink(flat(loop.holders[1]).nbytes, wait_for_the_update)
        snapshot = Snapshot(1, "layout", {0: [offer]}, is_flat=True)
        refill = Refill(snapshot, sink, may_map=True, timeout_s=patient(30))
        running = asyncio.ensure_future(asyncio.to_thread(refill.run))
        await reading.wait()
        await loop.update(2)
        written.set()
        with pytest.raises(ReadError, match="holder 1"):
            await running
        assert (sink.num_landed, sink.finished) == (1, False)
        refill.close()
        sink.targets[0].close()

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


@pytest.mark.parametrize("write", ["update", "refill"])
def test_the_header_is_gone_before_the_memory_of_a_source_is_written(write: str) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        name, holder = "e0", loop.holders[1]
        offer = holder.offer_live(SnapshotHeader(1, "layout", 0), 100)
        seen: list[str] = []
        with header_of(offer) as read:
            assert read().startswith(b'{"version":1')

            def look() -> None:
                try:
                    seen.append(read().rstrip(b"\0").decode())
                except (ReadError, TransportError):
                    seen.append("nothing is served")

            if write == "update":
                exchange = holder.cross_host
                assert exchange
                move = exchange.move

                def moving(wanted: Callable[[], bool]) -> None:
                    look()
                    move(wanted)

                exchange.move = moving  # type: ignore[method-assign]
                await loop.update(2)
            else:
                when_filled(holder, look, piece=0)
                loop.controller.engine_group.enter([name], EngineState.STALE)
                await loop.controller.refill(name)
        assert seen == ["nothing is served"]
        assert loop.wrong(name) == []

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)


@pytest.mark.parametrize("end", ["drop", "link", "prepare", "close"])
def test_nothing_is_served_of_memory_that_is_no_longer_mapped(end: str) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        holder, header = loop.holders[1], SnapshotHeader(1, "layout", 0)
        offer = await asyncio.to_thread(holder.offer_live, header, 100)
        with header_of(offer) as read:
            read()
            if end == "drop":
                holder.drop_engine()
            elif end == "link":
                holder.link(None)
            elif end == "prepare":
                assert loop.controller.plan
                await asyncio.to_thread(holder.prepare, loop.controller.plan, 1, "")
            else:
                await asyncio.to_thread(holder.close)
            with pytest.raises(ReadError):
                read()
        with pytest.raises(StateError, match="holder 1 does not know that its engine rank holds"):
            holder.offer_live(header, 101)

    drive(work, "a", {"e0": "b", "e1": "c"}, CONFIG)
