"""A fleet whose engines quantise in place after the first update, with doubles of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fleets.direct import Staging as DirectStaging
from tests.fleets.loop import CONFIG, Loop
from tests.fleets.loop import drive as drive_loop
from tests.fleets.rank_engine import RankEngine
from tests.kernel_doubles import use_doubles
from tests.quantised import same_bits
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.engines import whole_loads
from weightsync.engines.checkpoint import Checkpoint
from weightsync.engines.live_digest import LiveParameters, parameters_of
from weightsync.engines.quantizing_loader import QuantizingLoader, stored_tensors
from weightsync.engines.rank import Rank
from weightsync.engines.stored_loader import StoredLoader
from weightsync.engines.whole_sink import Loader
from weightsync.errors import TransportError
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.memory import quantizing_tables
from weightsync.memory.quantize import quantize
from weightsync.memory.quantizing_tables import QuantizingTables
from weightsync.memory.stored_places import StoredPlaces
from weightsync.memory.tensors import meta_of
from weightsync.plan import Plan, Segment
from weightsync.plan.formats import Format
from weightsync.protocol.handles import LiveExport
from weightsync.protocol.messages import Quantized
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalEngine, LocalTrainer

CPU = torch.device("cpu")
INT8 = Format(rule="compressed-tensors", values="int8", block=(1, 0))


class Host:
    """A model that stores matrices in int8, with a loader that only copies what it gets."""

    def __init__(self, model: nn.Module) -> None:
        metas = tuple(meta_of(name, each) for name, each in model.state_dict().items())
        self._checkpoint = Checkpoint(metas, (), frozenset(), "2 become int8")
        self.formats = {meta.name: INT8 for meta in metas if len(meta.shape) == 2}
        self.stored = stored = tuple(stored_tensors(self._checkpoint, self.formats))
        self._checkpoint = replace(self._checkpoint, stored=stored)
        self.live = nn.ParameterDict(
            {
                meta.name.replace(".", "_"): nn.Parameter(
                    torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)), requires_grad=False
                )
                for meta in stored
            }
        )
        self._places = self._found()
        self.num_loads = 0
        self.swaps = False

    def _found(self) -> StoredPlaces:
        segments = [
            Segment(meta.name, whole.box, meta.name.replace(".", "_"), 0, whole.strides)
            for meta, whole in ((meta, Segment.whole(meta)) for meta in self.stored)
        ]
        return StoredPlaces(segments, dict(parameters_of(self.live)), self.stored, self.formats)

    def move(self) -> None:
        """Give all parameters other memory."""
        for parameter in self.live.values():
            parameter.data = parameter.data.clone()
        self._places = self._found()

    def model(self) -> nn.Module:
        return self.live

    def converted(self) -> nn.Module:
        return self.live

    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def stored_otherwise(self) -> str:
        return "it is quantised"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("layouts of such engines are not traced")

    def places(self) -> StoredPlaces:
        return self._places

    def loader(self, stored: bool) -> Loader:
        is_known = self._places.are_right is not False
        loader = StoredLoader(self._places, self.own) if is_known else self.own()
        return loader if stored else QuantizingLoader(loader, self.formats)

    def own(self) -> Host:
        self.num_loads += 1
        return self

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            held = self.live[name.replace(".", "_")]
            held.data.copy_(tensor.flip(0) if self.swaps else tensor)

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def differ(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that are not those of a quantised checkpoint of `model`."""
        stored = stored_of(model, self.formats).items()
        return [name for name, each in stored if not same_bits(self.live[name.replace(".", "_")], each)]


def stored_of(model: nn.Module, formats: Collection[str]) -> dict[str, torch.Tensor]:
    """Return what a quantised checkpoint of `model` stores."""
    stored = {}
    for name, tensor in model.state_dict().items():
        if name in formats:
            stored |= {name.removesuffix("weight") + k: v for k, v in quantize(tensor, INT8)}
        else:
            stored[name] = tensor
    return stored


class Engine(RankEngine):
    host: Host

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return self.host.live.state_dict()


class Fleet(Loop):
    def __init__(self, config: SyncConfig = CONFIG) -> None:
        super().__init__(config)
        for name in self.engines:
            engine = self.engines[name] = Engine(name, {})
            engine.host = Host(self.model)
            engine.rank = Rank("test", 0, CPU, engine.host)
            self.fleet.engines[name].peer = LocalEngine(engine)

    @property
    def hosts(self) -> list[Host]:
        return [engine.host for engine in self.engines.values() if isinstance(engine, Engine)]


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


class Staging(DirectStaging):
    """Staging that quantises buckets into an engine rank's memory."""

    live: Mapping[str, torch.Tensor]
    buckets: list[int]
    plan: Plan
    can_quantize = True
    writes = False
    tables: QuantizingTables | None = None

    @property
    def quantizes(self) -> bool:  # type: ignore[override]
        return self.tables is not None

    def link(self, engine: LiveExport | None) -> None:  # type: ignore[override]
        if engine and engine.places and self.can_quantize:
            slots = [slot.tensor for slot in self._slots]
            memory = {name: each.detach().view(-1).view(torch.uint8) for name, each in self.live.items()}
            places = StoredPlaces.of(engine.places, memory)
            self.tables = QuantizingTables(self.plan, slots, places, engine.places.formats)

    def write(self, bucket: int) -> None:
        self.buckets.append(bucket)
        assert self.tables
        self.tables.run(bucket, torch.cuda.current_stream())

    def quantized(self) -> Quantized:
        assert self.tables
        return self.tables.result()


class Mapped(Fleet):
    """Its holders have mapped the engines' memory."""

    can_quantize = True

    def __init__(self, config: SyncConfig = CONFIG) -> None:
        self.buckets: dict[int, list[int]] = {1: [], 2: []}
        super().__init__(config)

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        if holder == 0:
            return super().stage(holder, plan, index, send_buffer, receives)
        staging = Staging(plan, index, send_buffer, receives)
        staging.live, staging.buckets, staging.begun = self.hosts[holder - 1].live, self.buckets[holder], []
        staging.can_quantize, staging.plan = self.can_quantize, plan
        return staging


class Unable(Mapped):
    """Its holders have no kernels for this."""

    can_quantize = False


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engine ranks export live memory as on a GPU."""
    monkeypatch.setattr(LiveParameters, "can_export", True)
    monkeypatch.setattr(LiveParameters, "export", lambda _: LiveExport("alike", {}))


def drive_mapped(
    work: Callable[[Mapped], Coroutine[object, object, None]],
    config: SyncConfig = CONFIG,
    cls: type[Mapped] = Mapped,
) -> None:
    """Drive a fleet that is connected and has taken version 1 through the engines' loaders."""

    async def started(loop: Loop) -> None:
        assert isinstance(loop, Mapped)
        await loop.controller.connect()
        loop.train()
        report = await loop.controller.update(1)
        assert report.engines == {"e0": 1, "e1": 1}
        assert loop.buckets == {1: [], 2: []}
        await work(loop)

    drive_loop(started, config, cls=cls)


async def refuse_to_serve(loop: Loop, reason: str) -> None:
    """Update to version 2, which the first engine must not serve, and the second does."""
    report = await loop.controller.update(2)
    assert report.engines == {"e0": 0, "e1": 2}
    assert reason in report.failures["e0"]
    assert loop.fleet.engines["e0"].record.state is EngineState.STALE


def drive(work: Callable[[Fleet], Coroutine[object, object, None]]) -> None:
    async def typed(loop: Loop) -> None:
        assert isinstance(loop, Fleet)
        await work(loop)

    drive_loop(typed, cls=Fleet)


def test_the_loader_is_asked_once_and_each_update_compares_live_weights() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            proof = "live weights with what was quantised and with 1 engine alike"
            assert report.proofs == {"e0": proof, "e1": proof}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive(work)


class Stored(Fleet):
    """Its trainer holds what the engines store: int8 values and scales."""

    def __init__(self, config: SyncConfig = CONFIG) -> None:
        super().__init__(config)
        self.stored = nn.Module()
        for number in "01":
            self.stored.add_module(number, nn.Module())
        for meta in self.hosts[0].stored:
            number, leaf = meta.name.split(".")
            held = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))
            self.stored.get_submodule(number).register_buffer(leaf, held)
        self.source = ModuleSource(self.stored)
        self.fleet.trainers[0] = LocalTrainer(self.source), 0

    def train(self) -> None:
        super().train()
        held = dict(self.stored.named_buffers())
        for name, each in stored_of(self.model, self.hosts[0].formats).items():
            held[name].copy_(each)


def test_what_is_stored_alike_is_not_quantised_again() -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Stored)
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert report.engines == {"e0": version, "e1": version}
            assert set(report.routes.values()) == {"it takes whole tensors, of which none is converted"}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]

    drive_loop(work, cls=Stored)


def test_a_loader_that_does_otherwise_loads_each_update() -> None:
    async def work(loop: Fleet) -> None:
        for host in loop.hosts:
            host.swaps = True
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.train()
            report = await loop.controller.update(version)
            assert set(report.proofs.values()) == {
                "what its loader got, and live weights with 1 engine alike"
            }
        assert [host.num_loads for host in loop.hosts] == [3, 3]

    drive(work)


def test_without_a_kernel_tensors_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Format] = []

    def can_quantize(_: torch.Tensor, form: Format) -> bool:
        asked.append(form)
        return False

    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        for version in (1, 2, 3):
            loop.train()
            report = await loop.controller.update(version)
            proof = "live weights with what was quantised and with 1 engine alike"
            assert report.proofs == {"e0": proof, "e1": proof}
            assert [host.differ(loop.model) for host in loop.hosts] == [[], []]
        assert [host.num_loads for host in loop.hosts] == [1, 1]
        assert len(asked) == 2, "each engine asks once"

    monkeypatch.setattr(quantizing_tables, "can_quantize", can_quantize)
    drive(work)


def test_a_live_byte_that_changes_meanwhile_keeps_the_engine_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        loop.train()
        await loop.controller.update(1)
        host, digests = loop.hosts[0], StoredPlaces.digests

        def flipped(places: StoredPlaces) -> object:
            if places is host.places():
                host.live["0_weight"].data[2, 3] ^= 1
            return digests(places)

        monkeypatch.setattr(StoredPlaces, "digests", flipped)
        loop.train()
        await refuse_to_serve(loop, "0.weight was written, and live memory holds other bytes")

    drive(work)


@pytest.mark.usefixtures("exports")
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


@pytest.mark.usefixtures("exports")
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


@pytest.mark.usefixtures("exports")
def test_a_byte_that_a_holder_wrote_elsewhere_keeps_the_engine_from_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        finish = Staging.quantized

        def flipped(staging: Staging) -> Quantized:
            made = finish(staging)
            if staging.live is loop.hosts[0].live:
                staging.live["0_weight_scale"].data[2] *= 2
            return made

        monkeypatch.setattr(Staging, "quantized", flipped)
        loop.train()
        await refuse_to_serve(loop, "0.weight_scale was written, and live memory holds other bytes")

    drive_mapped(work)


@pytest.mark.usefixtures("exports")
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


@pytest.mark.usefixtures("exports")
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


@pytest.mark.usefixtures("exports")
def test_an_update_after_one_in_which_a_holder_failed_writes_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(loop: Mapped) -> None:
        write = Staging.write

        def fail(staging: Staging, bucket: int) -> None:
            if staging.live is loop.hosts[0].live and bucket == 1:
                raise TransportError("an illegal memory access was encountered")
            write(staging, bucket)

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
