"""A trainer that writes what is being read: it is named, and no engine is blamed for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.fleets.direct import Direct, Staging
from tests.fleets.direct import drive as drive_direct
from tests.fleets.loop import Loop
from tests.fleets.loop import drive as drive_broadcast
from tests.patience import patient
from weightsync.driver.engine_state import EngineState
from weightsync.errors import SourceChangedError, StateError, VerifyError
from weightsync.memory.host import SharedBuffer
from weightsync.memory.kernels.host_table import HostTable
from weightsync.plan import Plan
from weightsync.protocol.handles import BufferHandle
from weightsync.protocol.messages import Attached, Published
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalPeer

WROTE = "version 2: trainer 0 wrote 1.weight while it was read"


@torch.no_grad()
def write(loop: Loop) -> None:
    loop.model[1].weight[2, 3] += 1  # type: ignore[index, operator]


class Interrupted(HostTable):
    """Calls `between` once it has copied and digested something."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def run(self, first: int, end: int, count: bool = False) -> None:
        super().run(first, end, count)
        if end > first:
            Interrupted.between()


@pytest.fixture(autouse=True)
def _tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.sources.piece_copies.HostTable", Interrupted)


def write_while_publishing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupted, "between", staticmethod(lambda: write(loop)))


def count_asked(loop: Loop) -> list[str]:
    asked: list[str] = []
    for holder in loop.holders:

        def digests(holder=holder, ask=holder.digests) -> object:  # type: ignore[no-untyped-def]
            asked.append(holder.name)
            return ask()

        holder.digests = digests  # type: ignore[method-assign]
    return asked


def states(loop: Loop) -> set[EngineState]:
    return {member.record.state for member in loop.fleet.engines.values()}


def test_a_write_while_publish_copies_is_the_trainers_and_engines_serve_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        asked = count_asked(loop)
        await loop.controller.update(1)
        served = loop.model[1].weight.detach().clone()
        with monkeypatch.context() as patch:
            write_while_publishing(loop, patch)
            with pytest.raises(SourceChangedError, match=WROTE) as caught:
                await loop.controller.update(2)
        assert caught.value.writers == (("trainer 0", ("1.weight",)),)
        assert asked == []
        assert states(loop) == {EngineState.SERVING}
        assert all(torch.equal(engine.tensors["1.weight"], served) for engine in loop.engines.values())
        assert (await loop.controller.update(3)).engines == {"e0": 3, "e1": 3}
        assert loop.holds_the_models_weights("e0")
        assert loop.holds_the_models_weights("e1")

    drive_broadcast(work)


def test_bytes_that_every_engine_holds_wrong_are_theirs_if_the_copy_is_as_it_was() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def flip(tensor: str, engine: str) -> None:
            if tensor == "1.weight":
                loop.engines[engine].tensors["0.weight"].view(torch.int32)[3, 4] ^= 1

        for name in loop.engines:
            loop.engines[name].on_write = lambda tensor, name=name: flip(tensor, name)  # type: ignore[misc]
        asked = count_asked(loop)
        with pytest.raises(VerifyError, match=r"wrong bytes in 0\.weight$"):
            await loop.controller.update(1)
        assert asked == ["holder 0"]

    drive_broadcast(work)


def test_one_of_several_that_were_sent_the_same_is_at_fault_and_nobody_is_asked() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def flip(tensor: str) -> None:
            if tensor == "1.weight":
                loop.engines["e1"].tensors["0.weight"].view(torch.int32)[3, 4] ^= 1

        loop.engines["e1"].on_write = flip
        asked = count_asked(loop)
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 0}
        assert "wrong bytes in 0.weight" in report.failures["e1"]
        assert asked == []

    drive_broadcast(work)


def test_a_holder_that_does_not_answer_accuses_nobody() -> None:
    class Flipping(ModuleSource):
        """Its copy is changed once it has published."""

        memory: SharedBuffer

        def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
            attached = super().attach(plan, trainer, send_buffer)
            assert send_buffer
            self.memory = SharedBuffer.open(send_buffer)
            return attached

        def publish(self, count: bool) -> Published:
            published = super().publish(count)
            self.memory.tensor[0] ^= 1
            return published

        def close(self) -> None:
            super().close()
            if hasattr(self, "memory"):
                self.memory.close()

    class Flipped(Loop):
        def source_of(self, model: nn.Module) -> ModuleSource:
            return Flipping(model)

    async def work(loop: Loop) -> None:
        await loop.controller.connect()

        def silent() -> None:
            raise StateError("holder 0 is closed")

        loop.holders[0].digests = silent  # type: ignore[method-assign, assignment]
        with pytest.raises(VerifyError, match=r"wrong bytes in 0\.weight"):
            await loop.controller.update(1)

    drive_broadcast(work, cls=Flipped)


def before_reading(loop: Direct, name: str, happens: Callable[[], None]) -> Callable[[], None]:
    """Call `happens` once, before engine `name` reads next; returns what undoes it."""
    staging = loop.holders[1 + [*loop.engines].index(name)].staging
    assert isinstance(staging, Staging)
    copy = staging.start_direct_copy

    def late(frozen: bool) -> None:
        happens()
        copy(frozen)

    staging.start_direct_copy = late  # type: ignore[method-assign]
    return lambda: setattr(staging, "start_direct_copy", copy)


def test_a_write_while_engines_read_in_place_demotes_none_of_them() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        both = asyncio.Barrier(2)
        running = asyncio.get_running_loop()

        def meet() -> None:
            asyncio.run_coroutine_threadsafe(both.wait(), running).result(patient(20))

        def write_first() -> None:
            write(loop)
            meet()

        undo = [before_reading(loop, "e0", write_first), before_reading(loop, "e1", meet)]
        with pytest.raises(SourceChangedError, match=WROTE):
            await loop.controller.update(2)
        assert states(loop) == {EngineState.STALE}
        for each in undo:
            each()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert report.routes == {"e0": "direct", "e1": "direct"}

    drive_direct(work)


def test_who_read_before_the_write_commits_and_who_read_after_it_is_not_demoted() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        running, read = asyncio.get_running_loop(), asyncio.Event()
        staging = loop.holders[1].staging
        assert isinstance(staging, Staging)
        copy = staging.start_direct_copy

        def first(frozen: bool) -> None:
            copy(frozen)
            running.call_soon_threadsafe(read.set)

        def wait_and_write() -> None:
            asyncio.run_coroutine_threadsafe(read.wait(), running).result(patient(20))  # type: ignore[arg-type]
            write(loop)

        staging.start_direct_copy = first  # type: ignore[method-assign]
        before_reading(loop, "e1", wait_and_write)
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0}
        assert WROTE in report.failures["e1"]
        assert report.routes == {"e0": "direct", "e1": "direct"}

    drive_direct(work)


def test_what_an_engine_has_wrong_besides_is_its_own() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging = loop.holders[2].staging
        assert isinstance(staging, Staging)
        copy = staging.start_direct_copy

        def bad(frozen: bool) -> None:
            write(loop)
            copy(frozen)
            loop.engines["e1"].tensors["0.bias"].view(torch.uint8)[0] ^= 1

        staging.start_direct_copy = bad  # type: ignore[method-assign]
        try:
            report = await loop.controller.update(1)
            told = report.failures["e1"]
        except SourceChangedError:  # e0 read after the write, too
            told = str(loop.controller.engine_group.failures["e1"])
        assert "wrong bytes in 0.bias" in told
        assert "1.weight" not in told

    drive_direct(work)


def test_what_a_trainer_writes_once_it_may_go_on_is_no_excuse() -> None:
    async def work(loop: Direct) -> None:
        await loop.controller.connect()
        staging = loop.holders[2].staging
        assert isinstance(staging, Staging)
        copy = staging.start_direct_copy

        def bad(frozen: bool) -> None:
            copy(frozen)
            loop.engines["e1"].tensors["1.weight"].view(torch.uint8)[0] ^= 1

        staging.start_direct_copy = bad  # type: ignore[method-assign]
        report = await loop.controller.update(1, lambda: write(loop))
        assert "wrong bytes in 1.weight" in report.failures["e1"]
        assert "what it read was wrong" in report.routes["e1"]

    drive_direct(work)


def test_a_holders_digests_are_those_that_its_trainer_published() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        published = loop.source.publish(True).digests
        assert np.array_equal(await LocalPeer(loop.holders[0]).digests(), published)
        with pytest.raises(StateError, match="serves no trainer rank"):
            loop.holders[1].digests()

    drive_broadcast(work)
    drive_direct(work)  # type: ignore[arg-type]
