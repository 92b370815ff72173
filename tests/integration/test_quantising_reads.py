"""After the first update, holders read from the trainer what they quantise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from tests.fleets.direct import Shared, Source
from tests.fleets.loop import CONFIG, Loop, drive
from tests.fleets.quantising import Mapped, Staging, drive_mapped, use_exports
from tests.kernel_doubles import Stream, use_doubles
from weightsync.channel.feed import HolderFeed
from weightsync.config import SyncConfig
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.driver.updating.controller import Controller
from weightsync.engines.loading import whole_loads
from weightsync.errors import PlanError, StateError, TransportError
from weightsync.holder.quantizing_copy import QuantizingCopy
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.plan import Plan, Reads
from weightsync.protocol.device_memory import LiveExport
from weightsync.protocol.handles import DeviceHandle
from weightsync.quantising.quantizing_reads import QuantizingReads
from weightsync.quantising.quantizing_tables import NoKernelError
from weightsync.quantising.stored_places import StoredPlaces
from weightsync.testing import LocalEngine, LocalPeer, LocalTrainer

DIRECT, WHOLE = "direct: 2 become int8", "it takes whole tensors, of which 2 become int8"


class Reading(Staging):
    """Staging that quantises what it reads, too."""

    shared: Shared
    reads: QuantizingReads | None = None
    copy: QuantizingCopy | None = None
    unreachable = False

    def link(self, engine: LiveExport | None) -> None:  # type: ignore[override]
        self.scratch = []
        super().link(engine)
        if engine and engine.places:
            memory = {name: each.detach().view(-1).view(torch.uint8) for name, each in self.live.items()}
            places = StoredPlaces.of(engine.places, memory)
            self.reads = QuantizingReads(self.plan, engine.places.reads(self.plan.tensors), places)

    def route(self, reads: Sequence[Reads], memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        if self.unreachable:
            raise TransportError("no peer access")
        assert self.reads
        self.scratch.append(torch.zeros(self.reads.nbytes, dtype=torch.uint8))
        held = {key: self.shared.buffer(handle) for key, handle in memory.items()}
        self.copy = QuantizingCopy(self.reads, reads, held, self.scratch[-1])  # type: ignore[arg-type]

    def start_direct_copy(self, frozen: bool = True) -> QuantizingCopy:  # type: ignore[override]
        assert self.copy
        return self.copy.begin(Stream(), frozen)  # type: ignore[arg-type]


class Near(Mapped):
    """Its trainer exports its memory, and its holders read it."""

    unreachable = False

    def __init__(self, config: SyncConfig = CONFIG) -> None:
        super().__init__(config)
        source = Source(self.model)
        source.shared = Shared()
        self.source = source
        self.fleet.trainers[0] = LocalTrainer(source), 0
        self.begun: list[int] = []

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        staging = Reading(plan, index, send_buffer, receives)
        staging.begun, staging.plan, staging.unreachable = self.begun, plan, self.unreachable
        staging.can_quantize = self.can_quantize
        assert isinstance(self.source, Source)
        staging.shared = self.source.shared
        if holder or len(self.holders) == 1:
            engine = max(holder, 1)
            staging.live, staging.buckets = self.hosts[engine - 1].live, self.buckets[engine]
        return staging


class Unreachable(Near):
    unreachable = True


class Alone(Near):
    """A trainer and an engine with one holder."""

    def __init__(self, config: SyncConfig = CONFIG) -> None:
        super().__init__(config)
        members = {"e0": EngineMember(LocalEngine(self.engines["e0"]), (0,))}
        del self.holders[1:], self.fleet.engines["e1"]
        self.fleet = Fleet(self.fleet.trainers, members, [LocalPeer(self.holders[0])])
        self.controller = Controller(config, self.fleet)


class WithoutBuckets(Near):
    """Its holders quantise what they read, and no buckets."""

    can_quantize = False


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)
    use_exports(monkeypatch)


def test_after_the_first_update_no_bucket_moves() -> None:
    async def work(loop: Mapped) -> None:
        assert isinstance(loop, Near)
        assert loop.begun, "the first goes through the engines' loaders"
        assert set(loop.controller.connection().router.routes.values()) == {WHOLE}
        for version in (2, 3):
            loop.begun.clear()
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert report.routes == {"e0": DIRECT, "e1": DIRECT}
            proof = "live weights with what was quantised and with 1 engine alike"
            assert report.proofs == {"e0": proof, "e1": proof}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
            assert loop.begun == []
            assert loop.buckets == {1: [], 2: []}
        assert [host.num_loads for host in loop.hosts] == [1, 1]
        await loop.controller.connect()  # what was shown holds for the next plan, too
        loop.begun.clear()
        loop.train()
        report = await loop.controller.update(4)
        assert report.routes == {"e0": DIRECT, "e1": DIRECT}
        assert loop.begun == []
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        for host in loop.hosts:
            host.move()
        await loop.controller.connect()  # it has to be shown again
        for version in (5, 6):
            loop.begun.clear()
            loop.train()
            await loop.controller.update(version)
            assert (loop.begun == []) == (version == 6)
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work, cls=Near)


def test_one_holder_reads_what_its_trainer_has() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Alone)
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.begun.clear()
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version}
            assert report.routes == {"e0": WHOLE if version == 1 else DIRECT}
            assert loop.hosts[0].differ(loop.model) == []
            assert (loop.begun == []) == (version > 1), "the first goes through the engine's loader"
        assert loop.hosts[0].num_loads == 1

    drive(work, cls=Alone)


def test_what_no_kernel_quantises_from_buckets_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: object) -> None:
        raise NoKernelError("0.weight: no kernel quantises it from buckets")

    async def work(loop: Mapped) -> None:
        assert isinstance(loop, Near)
        for version in (2, 3):
            loop.begun.clear()
            loop.train()
            report = await loop.controller.update(version)
            assert report.routes == {"e0": DIRECT, "e1": DIRECT}
            assert loop.begun == []
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(4)
        assert report.routes == {"e0": DIRECT, "e1": DIRECT}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert loop.buckets == {1: [], 2: []}
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    monkeypatch.setattr(whole_loads, "QuantizingTables", refuse)
    drive_mapped(work, cls=WithoutBuckets)


def test_a_byte_that_was_read_wrong_is_found_and_the_engine_takes_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        assert isinstance(loop, Near)
        launch = QuantizingReads.launch

        def flip(reads: QuantizingReads, group: int, stream: object) -> None:
            staging = loop.holders[1].staging
            assert isinstance(staging, Reading)
            if group == 1 and staging.reads is reads:
                staging.scratch[-1][5] ^= 1
            launch(reads, group, stream)  # type: ignore[arg-type]

        monkeypatch.setattr(QuantizingReads, "launch", flip)
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 0, "e1": 2}
        assert "0.weight" in report.failures["e0"]
        assert report.routes["e0"].startswith("what it read was wrong")
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert report.routes["e1"] == DIRECT
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert loop.buckets[1]

    drive_mapped(work, cls=Near)


@pytest.mark.parametrize("mode", ["unreachable", "broadcast", "whole"])
def test_others_take_whole_tensors(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(loop: Mapped) -> None:
        for version in (2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert set(report.routes.values()) == {WHOLE}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    def refuse(*_: object) -> None:
        raise PlanError("0.weight", "a rank keeps a part of a block")

    if mode == "whole":
        monkeypatch.setattr(whole_loads, "reads_layout", refuse)
    config = replace(CONFIG, mode="broadcast") if mode == "broadcast" else CONFIG
    drive_mapped(work, config, Unreachable if mode == "unreachable" else Near)


def test_a_holder_does_not_write_what_its_engine_rank_has_not_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        loop.train()
        with monkeypatch.context() as broken:
            broken.setattr(HolderFeed, "is_writable", lambda _: False)
            with pytest.raises(StateError, match=r"e\d has not said that what is quantised may be written"):
                await loop.controller.update(2)
        await loop.controller.connect()
        report = await loop.controller.update(3)
        assert report.engines == {"e0": 3, "e1": 3}
        assert [host.differ(loop.model) for host in loop.hosts] == [[], []]

    drive_mapped(work, cls=Near)
