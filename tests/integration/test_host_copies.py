"""What several ranks of a host would each read from other hosts, one holder there copies for all of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.fleets.loop import Loop
from tests.fleets.loop import drive as drive_loop
from tests.hosts_fleet import Hosts, drive
from tests.live_fleet import CONFIG, commit
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember
from weightsync.driver.updating.controller import Controller
from weightsync.driver.updating.refill import GaveWayError
from weightsync.errors import TransportError
from weightsync.holder.holder import Holder
from weightsync.holder.refill import PartSink, Refill
from weightsync.holder.snapshots import HEADER_NBYTES
from weightsync.protocol.messages import Refilled
from weightsync.testing import DictEngine, LocalEngine, LocalPeer

COPIES = replace(CONFIG, keep_versions=2, mirrors=0)
ENGINES = {"e0": "b", "e1": "b", "e2": "b", "e3": "b"}
TRAINERS = "ab"
STEP_NBYTES = 8192


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what refills and copies read of each holder."""
    nbytes, run = Counter[str](), Refill.run

    def counting(refill: Refill) -> Refilled:
        done = run(refill)
        nbytes.update(done.bytes_from)
        return done

    monkeypatch.setattr(Refill, "run", counting)
    monkeypatch.setattr("weightsync.holder.refill.STEP_NBYTES", STEP_NBYTES)
    return nbytes


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Call `act` once, when a copy comes to its step number `step`."""
    done = threading.Event()

    def acting(_: PartSink, bucket: int) -> None:
        if bucket == step and not done.is_set():
            done.set()
            act()

    monkeypatch.setattr(PartSink, "wait_free", acting)


async def join(loop: Hosts, *names: str, on: str = "d") -> None:
    """Replace each engine by a new one on `on`, which is connected but holds no weights yet."""
    for name in names:
        loop.respawn(name, on=on)
        await loop.controller.adopt(name)


async def fill(loop: Hosts, *names: str) -> None:
    await asyncio.gather(*(loop.controller.refill(name) for name in names))
    assert {name: loop.wrong(name) for name in names} == {name: [] for name in names}


def size(loop: Hosts | Loop, holder: int) -> int:
    """Return the bytes of the part that a holder keeps."""
    (part,) = loop.holders[holder].snapshots()
    return part.offer.memory.nbytes - HEADER_NBYTES


def kept(loop: Hosts) -> list[int]:
    """Return the holders that keep any part."""
    return [i for i, holder in enumerate(loop.holders) if holder.snapshots()]


@pytest.mark.parametrize("at_once", [True, False])
def test_each_byte_crosses_once_for_two_engines_whose_memory_nobody_maps(
    read: Counter[str], at_once: bool
) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2")
        for names in (("e1", "e2"),) if at_once else (("e1",), ("e2",)):
            await fill(loop, *names)
        sizes = {f"holder {i}": size(loop, i) for i in (0, 1)}
        assert {holder: read[holder] for holder in sizes} == sizes
        assert 2 * loop.size <= read["holder 6"] <= 2 * sum(sizes.values())
        assert kept(loop) == [0, 1, 6]
        await join(loop, "e3")  # the copy stays for the next one that joins
        await fill(loop, "e3")
        assert {holder: read[holder] for holder in sizes} == sizes
        async with loop.controller.exclusive():
            await loop.controller.connect()
            await loop.update(2)
        await loop.controller.snapshot_index.settled()
        assert kept(loop) == [0, 1]
        assert loop.holders[6].snapshot_store is not None
        assert [*loop.holders[6].snapshot_store.memory(0)] == []

    drive(work, TRAINERS, ENGINES, COPIES, trainers_on="", alone=[*ENGINES])


def test_each_byte_crosses_once_for_two_ranks_that_need_all_copies(read: Counter[str]) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", on="dd")
        await fill(loop, "e1")
        assert read.keys() == {"holder 0", "holder 5"}
        assert read["holder 0"] == size(loop, 0)
        assert 2 * loop.size <= read["holder 5"] <= 2 * size(loop, 0)

    drive(work, "a", {"e0": "bb", "e1": "bb"}, COPIES, trainers_on="", alone=["e0", "e1"])


def test_one_engine_alone_reads_for_itself_and_no_memory_is_taken(read: Counter[str]) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1")
        await fill(loop, "e1")
        assert read.keys() == {"holder 0", "holder 1"}
        assert kept(loop) == [0, 1]

    drive(work, TRAINERS, ENGINES, COPIES, trainers_on="", alone=[*ENGINES])


def test_a_source_that_dies_while_a_copy_is_made_is_replaced_from_there_on(
    read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert kept(loop) == [0, 1]
        store = loop.holders[1].snapshot_store
        assert store is not None
        at_step(monkeypatch, 2, store.close)
        await join(loop, "e1", "e2")
        read.clear()  # the mirror is a copy, too
        await fill(loop, "e1", "e2")
        assert read["holder 1"] == STEP_NBYTES  # half of each step before
        assert read["holder 0"] == size(loop, 0) - STEP_NBYTES
        assert read["holder 5"] >= 2 * loop.size

    monkeypatch.setattr("weightsync.holder.refill.LEAST_CUT_NBYTES", 1)
    monkeypatch.setattr("weightsync.readers.mapped.can_map", lambda _: False)  # which outlives its holder
    drive(work, "a", ENGINES, replace(COPIES, mirrors=1), hidden=240, trainers_on="", alone=[*ENGINES])


def test_where_no_copy_can_be_made_each_reads_for_itself(read: Counter[str]) -> None:
    def short(*_: object) -> None:
        raise TransportError("the host is short of memory")

    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2")
        loop.holders[6].replicate = short  # type: ignore[method-assign, assignment]
        await fill(loop, "e1", "e2")
        assert read.keys() == {"holder 0", "holder 1"}
        assert kept(loop) == [0, 1]

    drive(work, TRAINERS, ENGINES, COPIES, trainers_on="", alone=[*ENGINES])


def test_a_copy_with_wrong_bytes_is_not_read_again(
    read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = iter([True])

    def finish(sink: PartSink) -> None:
        if next(spoiled, False):
            sink.targets[0].tensor[-1000:] += 1

    monkeypatch.setattr(PartSink, "finish", finish)

    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2")
        await fill(loop, "e1", "e2")
        assert read["holder 0"] >= 2 * size(loop, 0)
        assert loop.controller.engine_group.failures == {}

    drive(work, "a", ENGINES, COPIES, trainers_on="", alone=[*ENGINES])


@pytest.mark.parametrize("hears", [True, False])
def test_an_update_ends_a_copy_and_both_engines_take_part_in_it(
    read: Counter[str], monkeypatch: pytest.MonkeyPatch, hears: bool
) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2")
        events, copying, wanted = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def wait() -> None:
            events.call_soon_threadsafe(copying.set)
            assert wanted.wait(CONFIG.timeout_s)

        at_step(monkeypatch, 1, wait)
        refills = [asyncio.ensure_future(loop.controller.refill(name)) for name in ("e1", "e2")]
        await copying.wait()
        stop = loop.holders[6].stop_refill

        def stopping(cause: str) -> None:
            if hears:
                stop(cause)
                wanted.set()

        loop.holders[6].stop_refill = stopping  # type: ignore[method-assign]
        async with loop.controller.exclusive():
            outcomes = await asyncio.gather(*refills, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [GaveWayError] * 2
            wanted.set()
            await loop.controller.connect()
            await loop.update(2)
        await loop.controller.snapshot_index.settled()
        assert not (read and hears)
        assert kept(loop) == [0, 1]

    drive(work, TRAINERS, ENGINES, COPIES, trainers_on="", alone=[*ENGINES])


class Joining(Loop):
    """Three engines on a host without the trainer. Each can be replaced by a new one on another host."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config, num_engines=3)
        self.fleet.nodes[:] = "abbb"

    def move(self, name: str, to: str) -> None:
        self.engines[name].close()
        zeros = {each: torch.zeros_like(tensor) for each, tensor in self.model.state_dict().items()}
        self.engines[name], number = DictEngine(name, zeros), len(self.holders)
        self.holders.append(Holder(f"holder {number}", "127.0.0.1"))
        self.fleet.holders.append(LocalPeer(self.holders[number]))
        self.fleet.nodes.append(to)
        self.fleet.engines[name] = EngineMember(LocalEngine(self.engines[name]), (number,))


def test_the_next_version_that_is_staged_takes_the_copys_place(read: Counter[str]) -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Joining)
        await loop.controller.connect()
        await loop.controller.update(1)
        for name in ("e1", "e2"):
            loop.move(name, "d")
            await loop.controller.adopt(name)
        read.clear()  # engines take staged versions in the same way
        assert [len(holder.snapshots()) for holder in loop.holders] == [1, 1, 0, 0, 0, 0]
        await asyncio.gather(*(loop.controller.refill(name) for name in ("e1", "e2")))
        assert [len(holder.snapshots()) for holder in loop.holders[4:]] == [1, 0]
        assert read["holder 0"] + read["holder 1"] == size(loop, 0)
        for version in (2, 3):
            loop.train()
            await loop.controller.connect()
            assert (await loop.controller.update(version)).engines == dict.fromkeys(loop.engines, version)
            await loop.controller.snapshot_index.settled()
            assert all(loop.holds_the_models_weights(name) for name in loop.engines)
            found = [part.header.version for holder in loop.holders for part in holder.snapshots()]
            assert found == [version] * 3

    drive_loop(work, replace(COPIES, stage="host"), Joining)


def test_deltas_begin_from_the_copy_that_filled_a_single_engine(read: Counter[str]) -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Joining)
        await loop.controller.connect()
        await loop.controller.update(1)
        loop.move("e1", "d")
        await loop.controller.adopt("e1")
        read.clear()
        await loop.controller.refill("e1")
        assert read["holder 0"] + read["holder 1"] == size(loop, 0)
        with torch.no_grad():
            next(loop.model.parameters()).view(-1)[:9] += 1
        await loop.controller.connect()
        report = await loop.controller.update(2)
        assert report.ways == {"holder 0": "mapped, delta"}
        assert report.bytes_from["holder 0"] < size(loop, 0)
        assert report.engines == dict.fromkeys(loop.engines, 2)
        assert all(loop.holds_the_models_weights(name) for name in loop.engines)

    drive_loop(work, replace(COPIES, stage="host", deltas="always"), Joining)


def test_a_driver_that_takes_over_uses_the_copy_and_has_it_freed(read: Counter[str]) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        await join(loop, "e1", "e2")
        await fill(loop, "e1", "e2")
        loop.controller = Controller(COPIES, loop.fleet)
        async with loop.controller.exclusive():
            await loop.controller.connect()
            await loop.controller.restore()
        read.clear()
        await join(loop, "e3")
        await fill(loop, "e3")
        assert read.keys() == {"holder 5"}
        async with loop.controller.exclusive():
            await loop.controller.connect()
            await loop.update(2)
        await loop.controller.snapshot_index.settled()
        assert kept(loop) == [0]

    drive(work, "a", ENGINES, COPIES, trainers_on="", alone=[*ENGINES])
