"""Direct updates over real holders and engines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fleets.direct import Direct, Engine, Staging, drive
from tests.fleets.loop import CONFIG, Loop
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, EngineError, PeerLostError, StateError, WeightSyncError
from weightsync.plan import Plan
from weightsync.protocol.messages import (
    Attached,
    FeedTicket,
    HolderDigests,
    Published,
    PublishReport,
    PublishTask,
)
from weightsync.report import Link
from weightsync.testing import LocalEngine, LocalTrainer


def test_engines_read_their_parts_and_nothing_is_broadcast() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        begun = loop.broadcasts()
        for version in (1, 2):
            loop.train()
            report = await loop.controller.update(version)
            assert report.routes == {"e0": "direct", "e1": "direct"}
            assert report.verified
            assert report.engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")
            assert report.num_buckets == 0
        assert begun == []
        assert loop.engines["e0"].num_written == 2
        nbytes = sum(tensor.nbytes for tensor in loop.model.state_dict().values())
        assert loop.controller.links() == [
            Link("trainer 0", f"engine {name} rank 0", "same host", nbytes) for name in ("e0", "e1")
        ]

    drive(work)


def test_what_a_holder_digests_reaches_its_engine_rank() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging, engine = loop.holders[1].staging, loop.engines["e0"]
        assert isinstance(staging, Staging)
        start_direct_copy, got = staging.start_direct_copy, list[HolderDigests | None]()

        def digested(frozen: bool) -> SimpleNamespace:
            start_direct_copy(frozen)
            return SimpleNamespace(result=lambda: HolderDigests.of_live(engine.digests()))

        staging.start_direct_copy = digested  # type: ignore[method-assign, assignment]
        engine.written = got.append  # type: ignore[method-assign, assignment]
        loop.train()
        await loop.controller.update(1)
        (made,) = got
        assert made
        assert made.wholes.tolist() == engine.digests().tolist()
        assert made.stored.tolist() == []

    drive(work)


def test_tensors_of_another_dtype_are_broadcast_in_the_same_update() -> None:
    async def work(loop: Direct) -> None:
        for engine in loop.engines.values():
            engine.tensors["1.weight"] = torch.zeros(5, 30, dtype=torch.bfloat16)
        await loop.controller.connect()
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"direct"}
        assert report.verified
        assert loop.controller.plan is not None
        names = [meta.name for meta in loop.controller.plan.tensors]
        cast = {
            bucket.index
            for bucket in loop.controller.plan.buckets()
            if "1.weight" in {names[piece.tensor] for piece in bucket.pieces}
        }
        assert set(begun) == cast
        assert report.num_buckets == len(cast)
        assert len(cast) < loop.controller.plan.num_buckets
        for name, tensor in loop.model.state_dict().items():
            held = loop.engines["e1"].tensors[name]
            assert torch.equal(tensor.to(held.dtype), held)

    drive(work)


def test_one_that_cannot_read_takes_broadcasts_beside_one_that_does() -> None:
    async def work(loop: Direct) -> None:
        loop.cut_off(2)
        await loop.controller.connect()
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(1)
        assert report.routes == {"e0": "direct", "e1": "no peer access"}
        assert loop.controller.plan is not None
        assert set(begun) == set(range(loop.controller.plan.num_buckets))
        for index, name in enumerate(loop.engines, start=1):
            staging = loop.holders[index].staging
            assert isinstance(staging, Staging)
            assert (staging.written == []) == (report.routes[name] == "direct")
            assert loop.holds_the_models_weights(name)

    drive(work)


def test_direct_alone_is_refused_where_an_engine_cannot_read() -> None:
    async def work(loop: Direct) -> None:
        loop.cut_off(2)
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e1.*no peer access"):
            await loop.controller.connect()

    drive(work, replace(CONFIG, mode="direct"))


def test_broadcast_alone_is_what_it_says() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"sync.mode is broadcast"}
        assert loop.holds_the_models_weights("e0")

    drive(work, replace(CONFIG, mode="broadcast"))


def test_an_engine_that_read_what_was_not_sent_is_stale_and_takes_broadcasts_from_then_on() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging = loop.holders[2].staging
        assert isinstance(staging, Staging)
        start_direct_copy = staging.start_direct_copy

        def half(frozen: bool) -> None:
            start_direct_copy(frozen)
            next(iter(loop.engines["e1"].tensors.values())).view(torch.uint8)[0] ^= 1

        staging.start_direct_copy = half  # type: ignore[method-assign]
        loop.train()
        report = await loop.controller.update(1)
        assert report.states == {"e0": "SERVING", "e1": "STALE"}
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        assert report.routes["e0"] == "direct"
        assert "what it read was wrong" in report.routes["e1"]
        assert loop.fleet.engines["e1"].record.state is EngineState.SERVING
        assert loop.holds_the_models_weights("e1")

    drive(work)


def test_an_engine_that_was_wrong_once_is_written_again_in_the_same_update(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer may have written during the copy: such digests do not show that the copy was wrong."""

    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging = loop.holders[2].staging
        assert isinstance(staging, Staging)
        start_direct_copy = staging.start_direct_copy

        def wrong_once(frozen: bool) -> None:
            start_direct_copy(frozen)
            next(iter(loop.engines["e1"].tensors.values())).view(torch.uint8)[0] ^= 1
            staging.start_direct_copy = start_direct_copy  # type: ignore[method-assign]

        staging.start_direct_copy = wrong_once  # type: ignore[method-assign]
        loop.train()
        with caplog.at_level(logging.WARNING):
            report = await loop.controller.update(1)
        assert "moves again, since bytes differed: engines e1" in caplog.text
        assert (report.engines, set(report.routes.values())) == ({"e0": 1, "e1": 1}, {"direct"})
        assert all(map(loop.holds_the_models_weights, loop.engines))

    drive(work)


def test_bytes_that_no_trainer_vouches_for_are_not_served() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        publish, moved = loop.source.publish, asyncio.Event()
        running = asyncio.get_running_loop()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        start_direct_copy = staging.start_direct_copy

        def notice(frozen: bool) -> None:
            start_direct_copy(frozen)
            running.call_soon_threadsafe(moved.set)

        def die(count: bool) -> Published:
            asyncio.run_coroutine_threadsafe(moved.wait(), running).result(patient(20))  # type: ignore[arg-type]
            raise PeerLostError("trainer 0", "killed")

        staging.start_direct_copy = notice  # type: ignore[method-assign]
        loop.source.publish = die  # type: ignore[method-assign]
        loop.train()
        with pytest.raises(PeerLostError, match="trainer 0"):
            await loop.controller.update(2)
        assert {each.record.state for each in loop.fleet.engines.values()} == {EngineState.STALE}
        assert loop.controller.version == 1
        loop.source.publish = publish  # type: ignore[method-assign]
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert all(map(loop.holds_the_models_weights, loop.engines))

    drive(work)


@pytest.mark.parametrize("setting", [{"nonfinite": "refuse"}, {}], ids=["refuse", "frozen"])
def test_what_may_refuse_a_version_is_known_before_a_byte_moves(setting: dict[str, Any]) -> None:
    class Ordered(Direct):
        frozen = () if setting else ("1.*",)

    loop = Ordered(replace(CONFIG, **setting))
    order: list[str] = []

    async def work() -> None:
        await loop.controller.connect()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        copy, publish = staging.start_direct_copy, loop.source.publish
        staging.start_direct_copy = lambda frozen: (order.append("copy"), copy(frozen))[1]  # type: ignore[method-assign]
        loop.source.publish = lambda count: (publish(count), order.append("digests"))[0]  # type: ignore[method-assign]
        loop.source.ready = lambda: order.append("ready") or True  # type: ignore[func-returns-value, method-assign]
        await loop.controller.update(1)

    try:
        asyncio.run(work())
    finally:
        loop.close()
    assert order == ["ready", "digests", "copy"]


def test_holders_read_while_a_trainer_digests() -> None:
    loop, copied = Direct(CONFIG), threading.Event()

    async def work() -> None:
        await loop.controller.connect()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        copy, publish = staging.start_direct_copy, loop.source.publish

        def start(frozen: bool) -> None:
            copied.set()
            copy(frozen)

        def digest(count: bool) -> Published:
            assert copied.wait(patient(10)), "holders wait for the digests"
            return publish(count)

        staging.start_direct_copy, loop.source.publish = start, digest  # type: ignore[method-assign]
        assert (await loop.controller.update(1)).verified

    try:
        asyncio.run(work())
    finally:
        loop.close()


def test_a_trainer_that_says_nothing_is_read_once_it_has_published() -> None:
    loop, order = Direct(CONFIG), list[str]()

    class Silent(LocalTrainer):
        async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
            report = await super().publish(task, asyncio.get_running_loop().create_future())
            order.append("published")
            return report

    async def work() -> None:
        loop.fleet.trainers[0] = (Silent(loop.source), loop.fleet.trainers[0][1])
        await loop.controller.connect()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        copy = staging.start_direct_copy
        staging.start_direct_copy = lambda frozen: (order.append("copy"), copy(frozen))[1]  # type: ignore[method-assign]
        assert (await loop.controller.update(1)).verified

    try:
        asyncio.run(work())
    finally:
        loop.close()
    assert order == ["published", "copy"]


class Asked(LocalTrainer):
    """Can be asked whether it may be read. `says` is its answer, None if none comes."""

    says: bool | WeightSyncError | None = True
    source_is_read: threading.Event | None = None

    def ask_readable(self, readable: asyncio.Future[None]) -> asyncio.Future[bool]:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if isinstance(self.says, WeightSyncError):
            answer.set_exception(self.says)
        elif self.says is not None:
            answer.set_result(self.says)
            if self.says:
                readable.set_result(None)
        return answer

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        if self.source_is_read:
            is_read = await asyncio.to_thread(self.source_is_read.wait, patient(10))
            assert is_read, "holders wait for the call to publish"
        return await super().publish(
            task, readable if not readable.done() else asyncio.get_running_loop().create_future()
        )


def test_a_trainer_that_says_when_asked_that_it_may_be_read_is_read_before_it_has_published() -> None:
    async def work(loop: Direct) -> None:
        trainer = Asked(loop.source)
        loop.fleet.trainers[0] = (trainer, loop.fleet.trainers[0][1])
        await loop.controller.connect()
        trainer.source_is_read = threading.Event()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        copy = staging.start_direct_copy

        def start(frozen: bool) -> None:
            assert trainer.source_is_read
            trainer.source_is_read.set()
            copy(frozen)

        staging.start_direct_copy = start  # type: ignore[method-assign]
        assert (await loop.controller.update(1)).verified
        assert loop.holds_the_models_weights("e0")

    drive(work)


@pytest.mark.parametrize("says", [False, None, StateError("trainer 0: none of your business")])
def test_a_trainer_that_does_not_say_so_is_called_at_once(says: bool | WeightSyncError | None) -> None:
    async def work(loop: Direct) -> None:
        trainer = Asked(loop.source)
        trainer.says = says
        loop.fleet.trainers[0] = (trainer, loop.fleet.trainers[0][1])
        await loop.controller.connect()
        assert (await loop.controller.update(1)).verified
        assert loop.holds_the_models_weights("e0")

    drive(work)


def test_what_is_published_on_the_host_is_broadcast_and_direct_is_refused() -> None:
    loop = Loop(CONFIG)
    refused = Controller(replace(CONFIG, mode="direct"), loop.fleet)

    async def work() -> None:
        with pytest.raises(ConfigError, match=r"sync\.mode.*engine e0: .*not read in place.*auto takes"):
            await refused.connect()
        await loop.controller.connect()
        report = await loop.controller.update(1)
        assert set(report.routes.values()) == {"the trainers' weights are not read in place"}
        assert report.num_buckets > 0
        assert loop.holds_the_models_weights("e1")

    try:
        asyncio.run(work())
    finally:
        loop.close()


def test_an_engine_whose_holder_cannot_write_takes_broadcasts_and_is_said_to_have_no_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(loop: Direct) -> None:
        engine = loop.engines["e1"]
        attach = engine.attach

        def alone(plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
            return [replace(each, export=None) for each in attach(plan, tickets, timeout_s)]

        engine.attach = alone  # type: ignore[method-assign]
        loop.cannot_write(2)
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert report.routes["e0"] == "direct"
        assert report.routes["e1"].startswith("its memory is not written by its holders: quantised")
        assert report.verified
        assert loop.holds_the_models_weights("e0")
        assert loop.holds_the_models_weights("e1")
        said = [record.message for record in caplog.records if "no snapshot fills it" in record.message]
        assert [each.split("]")[0] for each in said] == ["[engine e1"]

    drive(work)


def test_one_that_cannot_export_ahead_joins_too() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        engine = loop.engines["e1"]
        loop.fleet.engines["e1"] = EngineMember(LocalEngine(engine), (2,))
        with mock.patch.object(engine, "export", side_effect=EngineError("e1", "export", "not now")):
            await loop.controller.adopt("e1")
        loop.train()
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e1")

    drive(work)


def test_one_that_comes_later_in_anothers_place_reads_directly_too() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        staging, dead = loop.holders[2].staging, loop.engines["e1"]
        assert isinstance(staging, Staging)
        engine = Engine("e1", {name: torch.zeros_like(tensor) for name, tensor in dead.tensors.items()})
        engine.shared = staging.shared
        dead.close()
        staging.engine = loop.engines["e1"] = engine
        loop.fleet.engines["e1"] = EngineMember(LocalEngine(engine), (2,))
        assert staging.ahead == ()
        await loop.controller.adopt("e1")
        assert [*staging.ahead] == [*engine.tensors]
        begun = loop.broadcasts()
        loop.train()
        report = await loop.controller.update(2)
        assert report.routes == {"e0": "direct", "e1": "direct"}
        assert report.engines == {"e0": 2, "e1": 2}
        assert begun == []
        assert loop.holds_the_models_weights("e1")

    drive(work)
