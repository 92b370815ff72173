"""A copy of a version that was damaged in its holder's memory is blamed and dropped. No engine is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.fleets.loop import CONFIG as ONE_HOST
from tests.fleets.loop import Loop
from tests.fleets.loop import drive as drive_loop
from tests.hosts_fleet import Hosts, drive
from tests.live_fleet import CONFIG, THREE, commit, lose, when_filled
from tests.patience import patient
from weightsync.driver.copy_checks import differing
from weightsync.driver.engine_state import EngineState
from weightsync.driver.healing.healing import Healer
from weightsync.errors import ReadError, VerifyError
from weightsync.holder.holder import Holder

COPIES = replace(CONFIG, keep_versions=2, mirrors=1)
PLACES = pytest.mark.parametrize("place", ["header", "version", "body"])


def damage(holder: Holder, place: str) -> None:
    """Flip a bit of the copy in the memory of `holder`, or write another version into its header."""
    (part,) = holder.snapshots()
    assert holder.snapshot_store is not None
    held = holder.snapshot_store.held(part.header)
    assert held is not None
    if place == "version":  # it is valid, and says something else
        at = bytes(held.buffer.tensor[:100].tolist()).index(b'"version":1') + len('"version":')
        held.buffer.tensor[at] ^= 2
    elif place == "header":
        held.buffer.tensor[12] ^= 0x80
    else:
        held.bytes[0] ^= 1


def copies(loop: Hosts | Loop) -> list[int]:
    return [number for number, holder in enumerate(loop.holders) if holder.snapshots()]


@PLACES
@pytest.mark.parametrize("trainers_on", ["", "cuda"])
def test_another_copy_is_read_and_the_damaged_one_never_again(place: str, trainers_on: str) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        first, second = copies(loop)
        for name in ("e0", "e1"):  # nobody serves what could be read in place of a copy
            await lose(loop, name)
        damage(loop.holders[first], place)
        report = await loop.controller.refill("e0")
        assert loop.wrong("e0") == []
        assert report.bytes_from.keys() == {f"holder {second}"}
        assert loop.controller.engine_group.failures == {}
        report = await loop.controller.refill("e1")
        assert loop.wrong("e1") == []
        assert f"holder {first}" not in report.bytes_from
        await commit(loop, 2)
        assert copies(loop) == [first, second]

    engines = {"e0": "b", "e1": "c"}
    drive(work, "a", engines, COPIES, trainers_on=trainers_on, alone=[] if trainers_on else [*engines])


def test_a_copy_whose_header_is_damaged_while_it_is_read_is_replaced_by_another() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        first, second = copies(loop)
        await lose(loop, "e0")
        await lose(loop, "e1")
        at, store = loop.fleet.engines["e0"].holders[0], loop.holders[first].snapshot_store
        assert store is not None
        when_filled(loop.holders[at], lambda: damage(loop.holders[first], "header"))
        report = await loop.controller.refill("e0")
        assert loop.wrong("e0") == []
        assert report.bytes_from.keys() == {f"holder {second}"}

    drive(work, "a", {"e0": "b", "e1": "c"}, COPIES, hidden=240)


@PLACES
def test_a_damaged_copy_leaves_an_engine_that_serves(place: str) -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        assert copies(loop) == [1]
        await lose(loop, "e0")
        damage(loop.holders[1], place)
        await loop.controller.refill("e0")
        assert loop.wrong("e0") == []

    drive(work, "a", THREE, replace(COPIES, mirrors=0))


@PLACES
def test_without_another_source_the_copy_is_named_and_no_engine_is_respawned(place: str) -> None:
    async def work(loop: Loop) -> None:
        respawned = list[str]()

        async def respawn(name: str) -> bool:
            respawned.append(name)
            return False

        healer = Healer(ONE_HOST, loop.fleet, loop.controller, respawn, lambda _: True, respawn)  # type: ignore[arg-type]
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        damage(loop.holders[0], place)
        loop.controller.engine_group.blame("verify", {"e1": VerifyError("e1", 1, ["0.weight"])})
        deadline = time.monotonic() + patient(20)
        while healer.busy():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        error = healer.given_up["e1"]
        assert isinstance(error, ReadError)
        assert error.peer == "holder 0"
        assert respawned == []
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE
        loop.train()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}

    drive_loop(work)


def test_an_engine_that_spoils_what_it_got_is_still_blamed() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        engine = loop.engines["e1"]
        engine.on_write = lambda _: engine.tensors["0.bias"].zero_()
        loop.controller.engine_group.enter(["e1"], EngineState.STALE)
        with pytest.raises(VerifyError, match=r"0\.bias"):
            await loop.controller.refill("e1")
        assert loop.controller.can_refill("e1")

    drive_loop(work)


def of(value: int) -> np.ndarray:
    return np.full(3, value, np.uint64)


def test_copies_that_add_up_to_the_version_are_right_whichever_holder_has_them() -> None:
    found = {0: {"a": of(1), "b": of(7)}, 1: {"b": of(9), "c": of(2), "d": None}, 2: {"a": of(4)}}
    assert differing(found, of(7)) == [("b", 0), ("b", 1), ("d", 1)]
    assert differing(found, of(8)) == [(h, part) for part, its in found.items() for h in its]
    assert differing({0: {"a": of(1)}, 1: {"a": None}}, of(1)) == [("a", 1)]
    assert differing({0: {"a": of(1)}, 1: {}}, of(1)) == [], "its holder did not answer"
