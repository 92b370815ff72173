"""Where every engine reads directly there are no buckets and no communicators; else there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

import pytest
import torch

from tests.fleets.direct import Direct, Engine, Source
from tests.fleets.loop import CONFIG
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember
from weightsync.errors import ConfigError, PlanError
from weightsync.holder.staging import HostStaging
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.handles import Attached
from weightsync.protocol.messages import FeedTicket
from weightsync.testing import LocalPeer


class SourceOnDevice(Source):
    def layout(self) -> RankLayout:
        return replace(super().layout(), device="cuda:fake")


class EngineOnDevice(Engine):
    def layout(self) -> Sequence[RankLayout]:
        return [replace(layout, device="cuda:fake") for layout in super().layout()]


class OnDevice(Direct):
    """All weights are said to lie on a GPU."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.source.__class__ = SourceOnDevice
        for engine in self.engines.values():
            engine.__class__ = EngineOnDevice

    def stagings(self) -> list[HostStaging]:
        return [staging for holder in self.holders if isinstance(staging := holder.staging, HostStaging)]

    async def update(self, version: int) -> None:
        self.train()
        report = await self.controller.update(version)
        assert report.verified
        assert all(serves == version for serves in report.engines.values())
        assert all(self.holds_the_models_weights(name) for name in self.engines)


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
        assert not has_buckets(loop)
        await loop.update(1)
        await loop.update(2)

    drive(work)


def test_tensors_of_another_dtype_need_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        for engine in loop.engines.values():
            engine.tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.bfloat16)
        await loop.controller.connect()
        assert has_buckets(loop)

    drive(work)


def test_who_turns_out_not_to_be_reached_has_all_connect_with_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        loop.cut_off(2)
        await loop.controller.connect()
        assert has_buckets(loop)
        await loop.update(1)

    drive(work)


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
        await loop.controller.connect()
        assert has_buckets(loop)
        await loop.update(2)
        await loop.controller.connect()
        assert has_buckets(loop), "it was wrong once"

    drive(work)


def test_who_comes_later_and_cannot_be_written_needs_a_plan_with_buckets() -> None:
    async def work(loop: OnDevice) -> None:
        await loop.controller.connect()
        await loop.update(1)
        old = loop.engines["e1"]

        class Unshared(EngineOnDevice):
            def attach(
                self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
            ) -> Sequence[Attached]:
                return [replace(each, export=None) for each in super().attach(plan, tickets, timeout_s)]

        engine = Unshared("e1", {name: torch.zeros_like(tensor) for name, tensor in old.tensors.items()})
        engine.shared = old.shared
        old.close()
        loop.engines["e1"] = engine
        loop.fleet.engines["e1"] = EngineMember(LocalPeer(engine), (2,))
        with pytest.raises(PlanError, match=r"engine e1.*no buckets.*not written by its holders"):
            await loop.controller.adopt("e1")
        loop.cannot_write(2)
        await loop.controller.connect()
        assert has_buckets(loop)
        await loop.update(2)

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
