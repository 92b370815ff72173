"""Bytes that change in a window of the table in docs/internals/faults.md."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop
from tests.fleets.loop import drive as drive_loop
from tests.fleets.quantising import CPU, Engine, Fleet, Host
from tests.integration.test_restore import Left
from tests.integration.test_rewritten import Interrupted, write_while_publishing
from tests.integration.test_staged import STAGED, Stage, intercept
from tests.patience import patient
from weightsync.actors.coverage import coverage
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.quantizing_loader import QuantizingLoader
from weightsync.engines.rank.rank import Rank
from weightsync.errors import ReadError, SourceChangedError, TransportError, VerifyError
from weightsync.holder import staged_parts
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.protocol.handles import BufferHandle
from weightsync.protocol.messages import Attached, Published, StagedPart, StageTask
from weightsync.report import SyncReport
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalTrainer

BOTH = ("e0", "e1")


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[5] ^= 1


def proofs(loop: Loop, report: SyncReport | None) -> dict[str, str]:
    """Return what `coverage` says was compared, after the update of `report`."""
    rows = coverage("model", loop.controller, loop.fleet, report)
    return {row.engine: row.proof for row in rows}


class FlippedCopy(ModuleSource):
    """A byte of the send buffer changes once the digests are known."""

    memory: SharedBuffer
    flips = False

    def attach(self, plan: Plan, trainer: int, send_buffer: BufferHandle | None) -> Attached:
        attached = super().attach(plan, trainer, send_buffer)
        assert send_buffer
        self.memory = SharedBuffer.open(send_buffer)
        return attached

    def publish(self, count: bool) -> Published:
        published = super().publish(count)
        if self.flips:
            flip(self.memory.tensor)
        return published

    def close(self) -> None:
        super().close()
        if hasattr(self, "memory"):
            self.memory.close()


@pytest.mark.parametrize("offloads", [False, True], ids=["copied", "offloaded"])
def test_a_byte_that_changes_in_the_copy_of_a_trainers_weights_is_found(offloads: bool) -> None:
    class Copied(Loop):
        def source_of(self, model: nn.Module) -> ModuleSource:
            return FlippedCopy(model, offloads=offloads)

    async def work(loop: Loop) -> None:
        assert isinstance(loop.source, FlippedCopy)
        await loop.controller.connect()
        await loop.controller.update(1)
        if offloads:
            loop.source.offload()
        loop.source.flips = True
        with pytest.raises(SourceChangedError, match="trainer 0 wrote"):
            await loop.controller.update(2)
        assert [engine.version for engine in loop.engines.values()] == [1, 1]

    drive_loop(work, cls=Copied)


def test_a_byte_that_changes_on_the_host_after_it_was_staged_is_found() -> None:
    async def work(loop: Loop) -> None:
        def change(stage: Stage) -> Stage:
            def staged(task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
                done = stage(task, timeout_s)
                store = loop.holders[0].snapshot_store
                assert store
                for memory in store.memory(0):
                    flip(memory)
                return done

            return staged

        await loop.controller.connect()
        intercept(loop, 0, change)
        with pytest.raises(VerifyError):
            await loop.controller.update(1)
        assert {each.record.state for each in loop.fleet.engines.values()} == {EngineState.STALE}

    drive_loop(work, STAGED)


def test_a_byte_that_changes_while_it_is_staged_pauses_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        monkeypatch.setattr(staged_parts, "inject", lambda *_, data, **__: flip(data))
        with pytest.raises(TransportError, match="wrong bytes were staged"):
            await loop.controller.update(2)
        assert [engine.serving() for engine in loop.engines.values()] == [1, 1]

    drive_loop(work, STAGED)


class InTwoRanks(Loop):
    """Each layer is another trainer rank's."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        layers = {number: self.model.get_submodule(number) for number in "01"}
        self.sources = [ModuleSource(nn.ModuleDict({number: each})) for number, each in layers.items()]
        self.fleet.trainers[:] = [(LocalTrainer(source), i) for i, source in enumerate(self.sources)]

    def close(self) -> None:
        for source in self.sources:
            source.close()
        super().close()


def test_a_step_after_one_rank_has_published_and_before_another_does_is_noticed_by_nobody() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, InTwoRanks)
        await loop.controller.connect()
        (first, second), stepped = [each.publish for each in loop.sources], threading.Event()

        def publish_and_step(count: bool) -> Published:
            published = first(count)
            loop.train()
            stepped.set()
            return published

        def publish_late(count: bool) -> Published:
            assert stepped.wait(patient(10))
            return second(count)

        loop.sources[0].publish, loop.sources[1].publish = publish_and_step, publish_late  # type: ignore[method-assign]
        old = loop.model.get_parameter("0.weight").detach().clone()
        report = await loop.controller.update(1)
        assert (report.verified, report.proofs) == (True, dict.fromkeys(BOTH, "live weights"))
        held = loop.engines["e0"].tensors
        assert torch.equal(held["0.weight"], old)
        assert torch.equal(held["1.weight"], loop.model.get_parameter("1.weight"))
        assert not loop.holds_the_models_weights("e0")

    drive_loop(work, cls=InTwoRanks)


def test_a_source_of_ones_own_that_does_not_name_writes_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trusting(ModuleSource):
        def publish(self, count: bool) -> Published:
            return replace(super().publish(count), written=())

    class Own(Loop):
        def source_of(self, model: nn.Module) -> ModuleSource:
            return Trusting(model)

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        write_while_publishing(loop, monkeypatch)
        assert (await loop.controller.update(1)).verified
        assert not loop.holds_the_models_weights("e0")

    monkeypatch.setattr("weightsync.sources.piece_copies.HostTable", Interrupted)
    drive_loop(work, cls=Own)


class Unequal(Host):
    """Its loader stores other bytes than it got. Nothing is known of its parameters."""

    def converted(self) -> None:  # type: ignore[override]
        """No engine is compared with others."""

    def loader(self, stored: bool) -> Loader:
        return QuantizingLoader(self.own(), self.formats)


def test_what_a_loader_makes_of_the_right_tensors_is_noticed_by_nobody() -> None:
    class Loading(Fleet):
        def __init__(self, config: SyncConfig = CONFIG) -> None:
            super().__init__(config)
            for engine in self.engines.values():
                assert isinstance(engine, Engine)
                engine.host = Unequal(self.model)
                engine.rank = Rank("test", 0, CPU, engine.host)
                self.fleet.engines[engine.name].peer = LocalEngine(engine)

    async def work(loop: Loop) -> None:
        assert isinstance(loop, Loading)
        await loop.controller.connect()
        loop.hosts[0].swaps = True
        loop.train()
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 1}
        assert report.proofs == dict.fromkeys(BOTH, "what its loader got")
        assert loop.hosts[0].differ(loop.model)
        assert not loop.hosts[1].differ(loop.model)

    drive_loop(work, cls=Loading)


def test_a_byte_that_changes_while_an_engine_serves_is_written_by_the_next_update() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        await loop.controller.update(1)
        flip(loop.engines["e0"].tensors["0.weight"])
        assert loop.engines["e0"].serving() == 1
        assert (await loop.controller.update(2)).engines == {"e0": 2, "e1": 2}
        assert loop.holds_the_models_weights("e0")

    drive_loop(work)


def test_a_byte_that_changes_between_the_comparison_and_the_commit_is_served() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        resume = loop.engines["e0"].resume

        def late(version: int) -> None:
            flip(loop.engines["e0"].tensors["0.weight"])
            resume(version)

        loop.engines["e0"].resume = late  # type: ignore[method-assign]
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}
        assert not loop.holds_the_models_weights("e0")
        assert loop.holds_the_models_weights("e1")

    drive_loop(work)


def test_a_byte_that_changes_asleep_is_served_and_not_called_verified() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        report = await loop.controller.update(1)
        await loop.controller.snapshot_index.settled()
        assert proofs(loop, report) == dict.fromkeys(BOTH, "live weights")
        await loop.controller.sleep(["e0"], 1)
        assert proofs(loop, report) == {"e0": "", "e1": "live weights"}
        await loop.controller.wake(["e0"])
        flip(loop.engines["e0"].tensors["0.weight"])
        assert proofs(loop, report) == {"e0": "", "e1": "live weights"}
        assert loop.engines["e0"].serving() == 1
        await loop.controller.refill("e0")
        assert loop.holds_the_models_weights("e0")
        assert proofs(loop, report) == dict.fromkeys(BOTH, "live weights")

    drive_loop(work)


def test_a_byte_that_changed_before_a_driver_took_over_is_served_and_not_called_verified() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Left)
        await loop.until_version_2()
        flip(loop.engines["e1"].tensors["0.weight"])
        loop.controller = await loop.next_controller()
        assert await loop.controller.restore() == []
        assert loop.engines["e1"].serving() == 2
        assert proofs(loop, None) == dict.fromkeys(BOTH, "")
        await loop.controller.refill("e1")
        assert loop.holds_the_models_weights("e1")

    drive_loop(work, CONFIG, Left)


def test_a_copy_that_changed_before_a_driver_took_over_serves_nowhere() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Left)
        await loop.until_version_2()
        store = loop.holders[0].snapshot_store
        assert store
        flip(store.memory(0)[0])
        loop.controller = await loop.next_controller()
        await loop.controller.restore()
        with pytest.raises((ReadError, VerifyError)):
            await loop.controller.refill("e1")
        assert not loop.engines["e1"].serving()

    drive_loop(work, CONFIG, Left)
