"""Where every engine reads directly there are no buckets and no communicators; else there are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.fleets.direct import Direct, Engine, Shared, Source
from tests.fleets.loop import CONFIG
from tests.patience import patient
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember
from weightsync.errors import ConfigError, DeadlineError, PlanError, TransportError
from weightsync.holder.holder import Holder
from weightsync.holder.staging import HostStaging
from weightsync.memory.addresses import local_tensor
from weightsync.memory.tensors import named_tensors
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.handles import DeviceHandle
from weightsync.protocol.messages import Attached, FeedTicket, Prepared
from weightsync.testing import LocalEngine


class SourceOnDevice(Source):
    def layout(self) -> RankLayout:
        return replace(super().layout(), device="cuda:fake")

    def trial_handle(self) -> DeviceHandle:
        live = {name: local_tensor(tensor) for name, tensor in named_tensors(self.model)[0].items()}
        return self.shared.export(live).first()


class EngineOnDevice(Engine):
    def layout(self) -> Sequence[RankLayout]:
        return [replace(layout, device="cuda:fake") for layout in super().layout()]

    def can_export(self) -> Sequence[bool]:
        return [True]


class Opening(Holder):
    """A holder that records what it tried and prepared. It maps what is `shared`, unless it is failing."""

    shared: Shared
    failing: set[str]
    tried: list[list[str]]
    num_prepared: int

    def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str:
        self.tried.append(sorted(memory))
        if self.name in self.failing:
            return f"{self.name} cannot map the memory of trainer 0: no peer access"
        for handle in memory.values():
            self.shared.buffer(handle)
        return ""

    def prepare(self, *args: object) -> Prepared:
        self.num_prepared += 1
        return super().prepare(*args)  # type: ignore[arg-type]


class OnDevice(Direct):
    """All weights are said to be on a GPU.

    Attributes:
        openings: the holders.
        failing: names of holders whose trial fails.
    """

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.source.__class__ = SourceOnDevice
        for engine in self.engines.values():
            engine.__class__ = EngineOnDevice
        self.openings: list[Opening] = []
        self.failing = set[str]()
        for holder in self.holders:
            holder.__class__ = Opening
            assert isinstance(holder, Opening)
            holder.shared, holder.failing = self.source.shared, self.failing
            holder.tried, holder.num_prepared = [], 0
            self.openings.append(holder)

    def opened(self) -> list[int]:
        """Return how often each holder has prepared since the last call."""
        counts = [holder.num_prepared for holder in self.openings]
        for holder in self.openings:
            holder.num_prepared = 0
        return counts

    def stagings(self) -> list[HostStaging]:
        return [staging for holder in self.holders if isinstance(staging := holder.staging, HostStaging)]

    async def update(self, version: int) -> Mapping[str, str]:
        """Update and check both engines. Returns the routes by engine."""
        self.train()
        report = await self.controller.update(version)
        assert report.verified
        assert all(serves == version for serves in report.engines.values())
        assert all(self.holds_the_models_weights(name) for name in self.engines)
        assert list(report.connect_phases)[:4] == ["layouts", "trial", "plan", "prepare"]
        return report.routes


def drive(work: Callable[[OnDevice], Coroutine[object, object, None]], config: SyncConfig = CONFIG) -> None:
    loop = OnDevice(config)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()


def has_buckets(loop: OnDevice) -> bool:
    plan = loop.controller.plan
    assert plan is not None
    staged = [plan.staging_nbytes(holder) for holder in range(plan.members.num_holders)]
    assert (max(staged) > 0) == any(staging.slots for staging in loop.stagings())
    assert (max(staged) > 0) == any(holder.transports for holder in loop.holders)
    return max(staged) > 0


def test_no_memory_is_staged_and_nobody_meets_for_a_broadcast() -> None:
    async def work(loop: OnDevice) -> None:
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert [holder.tried for holder in loop.openings] == [[["trainer 0"]]] * 3
        assert not has_buckets(loop)
        await loop.update(1)
        await loop.update(2)

    drive(work)


def test_tensors_of_another_dtype_need_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        for engine in loop.engines.values():
            engine.tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.bfloat16)
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert has_buckets(loop)

    drive(work)


def test_a_holder_that_cannot_map_in_the_trial_gives_the_plan_buckets_for_its_engine_alone() -> None:
    async def work(loop: OnDevice) -> None:
        loop.failing.add("holder 2")
        loop.cut_off(2)
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert has_buckets(loop)
        reason = "holder 2 cannot map the memory of trainer 0: no peer access"
        assert await loop.update(1) == {"e0": "direct", "e1": reason}

    drive(work)


def test_a_trainers_holder_that_cannot_map_has_all_engines_take_broadcasts() -> None:
    async def work(loop: OnDevice) -> None:
        loop.failing.add("holder 0")
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        routes = await loop.update(1)
        assert {route[:8] for route in routes.values()} == {"holder 0"}

    drive(work)


def test_holders_in_host_memory_map_nothing() -> None:
    async def work(loop: OnDevice) -> None:
        for holder in loop.openings:
            holder.try_mapping = partial(Holder.try_mapping, holder)  # type: ignore[method-assign]
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        routes = await loop.update(1)
        assert routes == dict.fromkeys(loop.engines, "holder 0 has its buckets in host memory")

    drive(work)


def test_a_trial_that_hangs_is_named_by_its_deadline_before_anything_is_opened() -> None:
    over = threading.Event()

    def hang(_: object) -> str:
        over.wait(patient(60))
        return ""

    async def work(loop: OnDevice) -> None:
        loop.openings[2].try_mapping = hang  # type: ignore[method-assign]
        try:
            with pytest.raises(DeadlineError, match="trial: no answer") as caught:
                await loop.controller.connect()
        finally:
            over.set()
        assert caught.value.missing == ("holder 2",)
        assert loop.opened() == [0, 0, 0]

    drive(work, replace(CONFIG, connect_timeout_s=patient(0.5)))


def test_a_mapping_that_fails_after_a_good_trial_is_an_error_with_the_engine_and_the_reason() -> None:
    async def work(loop: OnDevice) -> None:
        loop.cut_off(2)
        with pytest.raises(TransportError, match=r"engine e1 .*in a trial.*no peer access.*sync\.mode"):
            await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert not loop.controller.connected
        loop.unreachable.clear()
        await loop.controller.connect()
        assert await loop.update(1) == {"e0": "direct", "e1": "direct"}

    drive(work)


def test_where_broadcasts_are_wanted_nothing_is_tried() -> None:
    async def work(loop: OnDevice) -> None:
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert [holder.tried for holder in loop.openings] == [[], [], []]

    drive(work, replace(CONFIG, mode="broadcast"))


def test_after_a_wrong_read_all_connect_with_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        await loop.controller.connect()
        staging = loop.stagings()[2]
        start_direct_copy = staging.start_direct_copy

        def wrong(frozen: bool) -> None:
            start_direct_copy(frozen)
            next(iter(loop.engines["e1"].tensors.values())).view(torch.uint8)[0] ^= 1

        staging.start_direct_copy = wrong  # type: ignore[method-assign]
        loop.train()
        report = await loop.controller.update(1)
        assert report.states == {"e0": "SERVING", "e1": "STALE"}
        assert not loop.controller.connected
        assert loop.opened() == [1, 1, 1]
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert has_buckets(loop)
        routes = await loop.update(2)
        assert routes["e0"] == "direct"
        assert "what it read was wrong" in routes["e1"]
        await loop.controller.connect()
        assert has_buckets(loop), "it was wrong once"

    drive(work)


def test_who_comes_later_and_cannot_be_written_needs_a_plan_with_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        await loop.controller.connect()
        await loop.update(1)
        old = loop.engines["e1"]

        class Unshared(EngineOnDevice):
            def can_export(self) -> Sequence[bool]:
                return [False]

            def attach(
                self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
            ) -> Sequence[Attached]:
                return [replace(each, export=None) for each in super().attach(plan, tickets, timeout_s)]

        engine = Unshared("e1", {name: torch.zeros_like(tensor) for name, tensor in old.tensors.items()})
        engine.shared = old.shared
        old.close()
        loop.engines["e1"] = engine
        loop.fleet.engines["e1"] = EngineMember(LocalEngine(engine), (2,))
        with pytest.raises(PlanError, match=r"engine e1.*no buckets.*not written by its holders"):
            await loop.controller.adopt("e1")
        loop.cannot_write(2)
        loop.opened()
        await loop.controller.connect()
        assert loop.opened() == [1, 1, 1]
        assert has_buckets(loop)
        routes = await loop.update(2)
        assert routes["e0"] == "direct"
        assert "not written by its holders" in routes["e1"]

    drive(work)


def test_direct_alone_is_refused_before_anybody_takes_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        loop.cannot_write(2)
        attach = loop.engines["e1"].attach

        def alone(plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
            return [replace(each, export=None) for each in attach(plan, tickets, timeout_s)]

        loop.engines["e1"].attach = alone  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e1: its memory is not written"):
            await loop.controller.connect()
        assert not any(staging.slots for staging in loop.stagings())

    drive(work, replace(CONFIG, mode="direct"))
