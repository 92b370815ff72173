"""A fleet whose holders quantise into engines' memory after the first update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop, drive
from tests.fleets.quantising import Mapped, Staging, Unable, drive_mapped, refuse_to_serve, use_exports
from tests.kernel_doubles import use_doubles
from weightsync.config import SyncConfig
from weightsync.driver.controller import Controller
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.engines import whole_loads
from weightsync.errors import TransportError
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.memory.piece_memory import SourcePieces
from weightsync.memory.quantizing_tables import QuantizingTables
from weightsync.memory.stored_places import StoredPlaces
from weightsync.plan import Plan, RankLayout, Segment
from weightsync.protocol.messages import HolderDigests
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer
from weightsync.transports import Pending


class Near(Staging):
    """Staging that can quantise its trainer's memory, too."""

    trained: nn.Module
    filled: list[int]
    from_source: QuantizingTables | None = None

    @property
    def quantizes_source(self) -> bool:  # type: ignore[override]
        return self.from_source is not None

    def make_tables(self, places: StoredPlaces) -> None:
        super().make_tables(places)
        held = {
            name: each.detach().view(-1).view(torch.uint8) for name, each in self.trained.named_parameters()
        }
        layout = RankLayout(self.plan.tensors, tuple(map(Segment.whole, self.plan.tensors)))
        pieces = SourcePieces.find(self.plan, layout, held)
        assert pieces
        self.from_source = self.tables_of(pieces, places)

    def fill(self, bucket: int, timeout_s: float) -> Sequence[Pending]:
        self.filled.append(bucket)
        return super().fill(bucket, timeout_s)

    def write(self, bucket: int, from_source: bool = False) -> None:
        if from_source:
            assert self.from_source
            self.from_source.run(bucket, torch.cuda.current_stream())
        else:
            super().write(bucket)

    def quantized(self, from_source: bool = False) -> HolderDigests:
        assert self.from_source
        return self.from_source.result() if from_source else super().quantized()


class Alone(Mapped):
    """A trainer and an engine with one holder."""

    def __init__(self, config: SyncConfig = CONFIG) -> None:
        self.filled: list[int] = []
        super().__init__(config)
        members = {"e0": EngineMember(LocalEngine(self.engines["e0"]), (0,))}
        self.fleet = Fleet([(LocalTrainer(self.source), 0)], members, [LocalPeer(self.holders[0])])
        self.controller = Controller(config, self.fleet)

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        staging = Near(plan, index, send_buffer, receives)
        staging.live, staging.buckets, staging.begun = self.hosts[0].live, self.buckets[1], []
        staging.plan, staging.trained, staging.filled = plan, self.model, self.filled
        return staging


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)
    use_exports(monkeypatch)


def test_holders_quantise_once_an_update_has_shown_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Mapped) -> None:
        for version in (2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            proof = "live weights with what was quantised and with 1 engine alike"
            assert report.proofs == {"e0": proof, "e1": proof}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
            plan = loop.controller.plan
            assert plan
            written = [*range(plan.num_buckets)] * (version - 1)
            assert loop.buckets == {1: written, 2: written}, "from the second version on"
        await loop.controller.connect()  # what was shown holds for the next plan, too
        loop.train()
        await loop.controller.update(4)
        assert len(loop.buckets[1]) == len(loop.buckets[2]) == 3 * plan.num_buckets
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    def refuse(*_: object) -> None:
        raise AssertionError("an engine rank prepared to quantise")

    monkeypatch.setattr(whole_loads, "QuantizingTables", refuse)
    drive_mapped(work)


def test_where_a_holder_has_no_kernel_the_rank_quantises() -> None:
    async def work(loop: Mapped) -> None:
        for version in (2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert loop.buckets == {1: [], 2: []}
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive_mapped(work, cls=Unable)


def test_a_byte_that_a_holder_wrote_elsewhere_keeps_the_engine_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        finish = Staging.quantized

        def flipped(staging: Staging, from_source: bool = False) -> HolderDigests:
            made = finish(staging, from_source)
            if staging.live is loop.hosts[0].live:
                staging.live["0_weight_scale"].data[2] *= 2
            return made

        monkeypatch.setattr(Staging, "quantized", flipped)
        loop.train()
        await refuse_to_serve(loop, "0.weight_scale was written, and live memory holds other bytes")

    drive_mapped(work)


def test_parameters_that_moved_since_connect_are_not_served() -> None:
    async def work(loop: Mapped) -> None:
        host = loop.hosts[0]
        host.move()
        loop.train()
        await refuse_to_serve(loop, "live parameters are in other memory than when connected")
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work)


def test_holders_quantise_what_was_staged_and_what_fills_an_engine_again() -> None:
    async def work(loop: Mapped) -> None:
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 2}
        plan = loop.controller.plan
        assert plan
        assert loop.buckets == {1: [*range(plan.num_buckets)], 2: [*range(plan.num_buckets)]}
        loop.hosts[1].live["0_weight"].data.zero_()
        await loop.controller.refill("e1")
        assert loop.buckets[2] == [*range(plan.num_buckets)] * 2
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work, replace(CONFIG, stage="host"))


def test_an_update_after_one_in_which_a_holder_failed_writes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        write = Staging.write

        def fail(staging: Staging, bucket: int, from_source: bool = False) -> None:
            if staging.live is loop.hosts[0].live and bucket == 1:
                raise TransportError("an illegal memory access was encountered")
            write(staging, bucket, from_source)

        with monkeypatch.context() as broken:
            broken.setattr(Staging, "write", fail)
            loop.train()
            with pytest.raises(TransportError, match="illegal memory access"):
                await loop.controller.update(2)
        states = [member.record.state for member in loop.fleet.engines.values()]
        assert EngineState.SERVING not in states
        await loop.controller.connect()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive_mapped(work)


def test_one_holder_quantises_what_its_trainer_has_where_it_is() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Alone)
        await loop.controller.connect()
        host = loop.hosts[0]
        for version in (1, 2, 3):
            loop.filled.clear()
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version}
            assert host.differ(loop.model) == []
            assert (loop.filled == []) == (version > 1), "the first goes through the engine's loader"
        assert loop.buckets[1] == []
        assert host.num_loads == 1

    drive(work, cls=Alone)


def test_a_version_other_than_the_trainers_is_quantised_from_slots() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Alone)
        await loop.controller.connect()
        host = loop.hosts[0]
        for version in (1, 2):
            loop.train()
            await loop.controller.update(version)
        plan = loop.controller.plan
        assert plan
        assert loop.buckets[1] == [*range(plan.num_buckets)], "version 2 was staged"
        served = copy.deepcopy(loop.model)
        host.live["0_weight"].data.zero_()
        loop.train()
        await loop.controller.refill("e0")
        assert host.differ(served) == []
        assert loop.buckets[1] == [*range(plan.num_buckets)] * 2

    drive(work, replace(CONFIG, stage="host"), cls=Alone)
