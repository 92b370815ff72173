"""An engine whose experts moved is planned again while it is paused; whatever fails, no wrong slot serves."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from tests.fleets.loop import CONFIG, Loop, drive
from tests.fleets.slot_engine import SlotEngine, Stack
from tests.hosts_fleet import Engine, Hosts
from tests.hosts_fleet import drive as drive_hosts
from tests.live_fleet import CONFIG as HOSTS
from tests.live_fleet import commit, lose
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.driver.updating.controller import Controller
from weightsync.errors import EngineError, ReadError, StateError, VerifyError
from weightsync.plan import Layout, RankLayout
from weightsync.plan.layout.arrangement import Arrangement, Experts, arrangement_key
from weightsync.protocol.messages import Loaded
from weightsync.testing import LocalEngine

MOVED = [3, 1, 1, 0, 2]


class SlotLoop(Loop):
    """Two engines whose experts move."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.slots = {name: SlotEngine(name) for name in self.engines}
        self.engines = dict(self.slots)
        self.fleet.engines |= {
            name: EngineMember(LocalEngine(engine), (i + 1,))
            for i, (name, engine) in enumerate(self.slots.items())
        }

    def make(self) -> Stack:
        return Stack()

    def states(self) -> list[EngineState]:
        return [member.record.state for member in self.fleet.engines.values()]

    async def update(self, version: int) -> None:
        self.train()
        await self.controller.update(version)


start = partial(drive, config=CONFIG, cls=SlotLoop)


def test_the_engine_alone_is_planned_again() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        loop.slots["e0"].move_experts([MOVED])
        await loop.update(2)
        await loop.update(3)
        assert [engine.num_attached for engine in loop.slots.values()] == [2, 1]
        assert all(engine.holds(loop.model) for engine in loop.slots.values())
        assert loop.controller.connection().plan.epoch == 1

    start(work)


def test_layouts_of_before_are_dropped() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        counts = list[int]()
        for version, start in enumerate((1, 2, 3, 4, 5), start=1):
            loop.slots["e0"].move_experts([[(start + slot) % 4 for slot in range(5)]])
            await loop.update(version)
            gc.collect()
            counts.append(sum(isinstance(each, Layout) for each in gc.get_objects()))
        assert max(counts[2:]) <= counts[1]
        assert loop.slots["e0"].num_attached == 6

    start(work)


def test_an_engine_that_cannot_be_planned_again_is_left_out_and_filled_later() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        layout, failing = SlotEngine.layout, [True]

        def fails(engine: SlotEngine) -> Sequence[RankLayout]:
            if engine.name == "e0" and failing:
                raise EngineError("e0", "layout", "no answer")
            return layout(engine)

        with mock.patch.object(SlotEngine, "layout", fails):
            loop.slots["e0"].move_experts([MOVED])
            await loop.update(2)
            assert loop.states() == [EngineState.STALE, EngineState.SERVING]
            assert not loop.slots["e0"].holds(loop.model)
            failing.clear()
            await loop.controller.adopt("e0")
            await loop.controller.refill("e0")
        assert all(engine.holds(loop.model) for engine in loop.slots.values())

    start(work)


def test_a_move_is_one_commit_of_the_version_that_serves() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        report = await loop.controller.move_experts({"e0": [MOVED], "e1": [MOVED[::-1]]})
        assert (report.version, report.engines) == (1, {"e0": 1, "e1": 1})
        assert [engine.slots for engine in loop.slots.values()] == [MOVED, MOVED[::-1]]
        assert all(engine.holds(loop.model) and engine.serving() == 1 for engine in loop.slots.values())

    start(work)


def test_a_move_right_after_a_staged_update_is_compared_with_that_version() -> None:
    """Holders have not kept the version yet."""

    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        for version, experts in ((1, MOVED), (2, MOVED[::-1])):
            await loop.update(version)
            report = await loop.controller.move_experts({"e0": [experts]})
            assert report.engines == {"e0": version, "e1": version}
        assert all(engine.holds(loop.model) for engine in loop.slots.values())

    start(work, config=replace(CONFIG, stage="host"))


def test_a_version_of_which_no_digest_is_kept_is_not_moved() -> None:
    """The driver ended before holders kept the version that engines serve. They have the one before."""

    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        await loop.controller.snapshot_index.settled()
        with mock.patch.object(SnapshotIndex, "begin"):
            await loop.update(2)
        for name, engine in loop.slots.items():
            loop.fleet.engines[name] = EngineMember(LocalEngine(engine), loop.fleet.engines[name].holders)
        controller = Controller(CONFIG, loop.fleet)
        await controller.connect()
        assert await controller.restore() == []
        assert controller.version == 2
        with pytest.raises(StateError, match="digests of version 2 are not kept"):
            await controller.move_experts({"e0": [MOVED]})
        assert all(engine.holds(loop.model) and engine.serving() == 2 for engine in loop.slots.values())

    start(work)


def test_experts_with_wrong_bytes_after_a_move_do_not_serve() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        move = SlotEngine.move_experts

        def wrong(engine: SlotEngine, experts: Experts) -> None:
            move(engine, experts)
            engine.tensors["experts"][2].view(torch.uint8)[0, 1] ^= 4  # the second copy of expert 1

        with (
            mock.patch.object(SlotEngine, "move_experts", wrong),
            pytest.raises(VerifyError, match=r"e0.*experts"),
        ):
            await loop.controller.move_experts({"e0": [MOVED]})
        assert loop.states() == [EngineState.STALE, EngineState.SERVING]
        await loop.controller.adopt("e0")
        await loop.controller.refill("e0")
        assert loop.slots["e0"].slots == MOVED
        assert loop.slots["e0"].holds(loop.model)

    start(work)


def test_an_engine_that_fails_as_it_moves_experts_is_stale_and_others_move() -> None:
    async def work(loop: SlotLoop) -> None:
        await loop.controller.connect()
        await loop.update(1)
        move = SlotEngine.move_experts

        def fails(engine: SlotEngine, experts: Experts) -> None:
            if engine.name == "e0":
                raise EngineError("e0", "move_experts", "a copy failed")
            move(engine, experts)

        with (
            mock.patch.object(SlotEngine, "move_experts", fails),
            pytest.raises(EngineError, match="a copy failed"),
        ):
            await loop.controller.move_experts({"e0": [MOVED], "e1": [MOVED]})
        assert loop.states() == [EngineState.STALE, EngineState.SERVING]
        with pytest.raises(StateError, match="engine e0 does not serve version 1"):
            await loop.controller.move_experts({"e0": [MOVED]})
        await loop.update(2)
        assert all(engine.holds(loop.model) for engine in loop.slots.values())
        loop.controller.connected = False
        with pytest.raises(StateError, match="the next update connects the fleet again"):
            await loop.controller.move_experts({"e1": [MOVED]})

    start(work)


class Swapping(Engine):
    """Shares its memory, and exchanges the places of two tensors, as if they were experts."""

    swapped = False

    def swap(self) -> None:
        names = {"gate": "up", "up": "gate"}
        for rank in self.ranks:
            rank.segments = [
                replace(each, tensor=names.get(each.tensor, each.tensor)) for each in rank.segments
            ]
        self.swapped = not self.swapped

    def layout(self) -> Sequence[RankLayout]:
        where = Arrangement(arrangement_key(self.experts()))
        return [replace(rank, arrangement=where) for rank in super().layout()]

    def experts(self) -> Experts:
        return [[1, 0] if self.swapped else [0, 1]]

    def move_experts(self, experts: Experts) -> None:
        if experts != [[1, 0]]:
            raise EngineError(self.name, "move_experts", "a copy failed")
        for rank in self.ranks:
            both = [rank.view(each, "float32") for each in rank.segments if each.tensor in ("gate", "up")]
            both[0][...], both[1][...] = both[1].copy(), both[0].copy()
        self.swap()

    def live_digests(self) -> Sequence[Loaded]:
        return [Loaded(writer.digests(), ()) for writer in self._writers]


def test_copies_that_fill_engines_follow_a_move_and_stay_if_it_fails() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        with pytest.raises(EngineError, match="a copy failed"):
            await loop.controller.move_experts({"e0": [[0, 1]]})
        await loop.controller.snapshot_index.settled()
        assert loop.controller.can_refill("e0")
        await loop.controller.refill("e0")
        assert loop.wrong("e0") == []
        await loop.controller.move_experts({"e0": [[1, 0]]})
        assert loop.wrong("e0") == []
        await loop.controller.snapshot_index.settled()
        assert loop.controller.can_refill("e0")
        for rank in loop.engines["e0"].ranks:
            rank.view(rank.segments[4], "float32")[...] = 7
        assert loop.wrong("e0") != []
        await loop.controller.refill("e0")
        assert loop.wrong("e0") == []

    with mock.patch("tests.hosts_fleet.Engine", Swapping):
        drive_hosts(work, "a", {"e0": "a"}, replace(HOSTS, keep_versions=2, refill="zeromq"))


def test_a_version_is_not_compared_once_a_connect_has_numbered_the_tensors_otherwise() -> None:
    """Tensors are numbered as they come in the first engine: other digests would blame a right engine."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        await loop.controller.move_experts({"e0": [[1, 0]]})
        await loop.controller.connect()
        with pytest.raises(StateError, match="digests of version 1 are not kept"):
            await loop.controller.move_experts({"e1": [[1, 0]]})
        assert [loop.engines[name].serving() for name in ("e0", "e1")] == [1, 1]
        assert not loop.controller.can_refill("e1")
        await loop.update(2)
        await loop.controller.move_experts({"e1": [[1, 0]]})
        assert [loop.wrong(name) for name in ("e0", "e1")] == [[], []]

    with mock.patch("tests.hosts_fleet.Engine", Swapping):
        drive_hosts(work, "a", {"e0": "a", "e1": "a"}, HOSTS)


@pytest.mark.parametrize("sources", [["e1"], ["e1", "e2"]])
def test_an_engine_is_not_blamed_for_the_places_of_a_sources_experts(sources: list[str]) -> None:
    """The source's own balancer moved them since it was planned. Another source fills the engine."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        moving = loop.engines["e1"]
        assert isinstance(moving, Swapping)
        moving.move_experts([[1, 0]])
        await lose(loop, "e0")
        if len(sources) > 1:
            await loop.controller.refill("e0")
            assert loop.wrong("e0") == []
        else:
            with pytest.raises(ReadError, match=r"holder \d.*experts of engine e1 moved"):
                await loop.controller.refill("e0")
            with pytest.raises(StateError, match="no engine alike serves it"):
                await loop.controller.refill("e0")
        await loop.update(2)
        assert [name for name in loop.engines if loop.wrong(name)] == []

    hosts = dict(zip(["e0", *sources], "bcd", strict=False))
    with mock.patch("tests.hosts_fleet.Engine", Swapping):
        drive_hosts(work, "a", hosts, HOSTS)


@pytest.mark.parametrize(("trainers", "are_near"), [("a", True), ("b", False)])
def test_direct_reads_go_where_experts_are_now(trainers: str, are_near: bool) -> None:
    """Reads from other hosts are planned for all hosts together, so that all connect again."""

    async def work(loop: Hosts) -> None:
        await commit(loop)
        routes, router = await loop.update(2), loop.controller.connection().router
        for version in (3, 4):
            engine = loop.engines["e0"]
            assert isinstance(engine, Swapping)
            engine.swap()
            assert loop.wrong("e0") != []
            assert await loop.update(version) == routes
            assert (loop.controller.connection().router is router) is are_near

    with mock.patch("tests.hosts_fleet.Engine", Swapping):
        drive_hosts(work, trainers, {"e0": "aa", "e1": "aa"}, HOSTS)
