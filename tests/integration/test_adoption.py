"""How an engine that joins is connected with its holders: real holders, and doubles of mapped memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from tests.hosts_fleet import Engine, Hosts, Staging, drive
from tests.live_fleet import CONFIG, commit
from tests.patience import patient
from weightsync.errors import DeadlineError, PlanError
from weightsync.holder.holder import Holder
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.messages import Attached, FeedTicket

NEAR = {"e0": "a", "e1": "a"}


def test_holders_prepare_for_an_engine_while_it_lays_out_its_memory() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        adopt, layout, adopted = Holder.adopt, Engine.layout, threading.Event()

        def noted(holder: Holder, plan: Plan, engine: str) -> FeedTicket:
            ticket = adopt(holder, plan, engine)
            adopted.set()
            return ticket

        def late(engine: Engine) -> Sequence[RankLayout]:
            assert adopted.wait(patient(10)), "holders wait for the layout"
            return layout(engine)

        with mock.patch.object(Holder, "adopt", noted), mock.patch.object(Engine, "layout", late):
            loop.respawn("e1")
            await loop.controller.adopt("e1")
        assert loop.fleet.engines["e1"].attached

    drive(work, "a", NEAR, CONFIG)


def test_the_memory_of_an_engine_before_is_used_no_more_and_unmapped_once_the_next_one_is_filled() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        attach, targets = Engine.attach, list[object]()

        def noting(
            engine: Engine, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float
        ) -> Sequence[Attached]:
            (holder,) = loop.fleet.engines["e1"].holders
            targets.append(loop.holders[holder].staging.target)
            return attach(engine, plan, tickets, timeout_s)

        with (
            mock.patch.object(Engine, "attach", noting),
            mock.patch.object(Staging, "unmap_forgotten") as unmap,
        ):
            loop.respawn("e1")
            await loop.controller.adopt("e1")
            assert targets == [{}]
            assert not unmap.called, "it would slow down what maps memory"
            await loop.controller.refill("e1")
            assert unmap.call_count == 1
            assert await loop.update(2) == {"e0": "direct", "e1": "direct"}
            assert unmap.call_count == 3, "once for each holder"

    drive(work, "a", NEAR, CONFIG)


def test_no_holder_still_prepares_when_an_engine_of_another_layout_has_all_connect_again() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        adopt, layout, asked, ended = Holder.adopt, Engine.layout, threading.Event(), threading.Event()

        def slow(holder: Holder, plan: Plan, engine: str) -> FeedTicket:
            assert asked.wait(patient(10))
            time.sleep(0.2)
            ticket = adopt(holder, plan, engine)
            ended.set()
            return ticket

        def other(engine: Engine) -> Sequence[RankLayout]:
            asked.set()
            return [replace(rank, padding=(*rank.padding, ("norm", 0, 0))) for rank in layout(engine)]

        with mock.patch.object(Holder, "adopt", slow), mock.patch.object(Engine, "layout", other):
            loop.respawn("e1")
            with pytest.raises(PlanError, match=r"engine e1: its layout is new to the plan"):
                await loop.controller.adopt("e1")
            assert ended.is_set()
        await loop.controller.connect()
        assert await loop.update(2) == {"e0": "direct", "e1": "direct"}

    drive(work, "a", NEAR, CONFIG)


def test_an_engine_that_hangs_as_it_exports_is_named_alone() -> None:
    async def work(loop: Hosts) -> None:
        await commit(loop)
        hung = threading.Event()

        def hang(*_: object) -> Sequence[object]:
            assert hung.wait(patient(30))
            return ()

        with (
            mock.patch.object(Engine, "export", hang, create=True),
            mock.patch.object(Engine, "attach", hang),
        ):
            loop.respawn("e1")
            try:
                with pytest.raises(DeadlineError) as raised:
                    await loop.controller.adopt("e1")
            finally:
                hung.set()
        assert raised.value.missing == ("engine e1",)

    drive(work, "a", NEAR, replace(CONFIG, timeout_s=patient(0.5)))
