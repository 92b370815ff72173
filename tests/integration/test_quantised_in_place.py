"""A fleet whose engines quantise in place after the first update, with doubles of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop
from tests.fleets.loop import drive as drive_loop
from tests.fleets.rank_engine import RankEngine
from tests.kernel_doubles import use_doubles
from tests.quantised import same_bits
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.engines import quantizing_sink
from weightsync.engines.checkpoint import Checkpoint
from weightsync.engines.live_digest import parameters_of
from weightsync.engines.quantizing_loader import QuantizingLoader, stored_tensors
from weightsync.engines.rank import Rank
from weightsync.engines.stored_places import StoredLoader, StoredPlaces
from weightsync.engines.whole_sink import Loader
from weightsync.memory.quantize import quantize
from weightsync.memory.tensors import meta_of
from weightsync.plan import Segment
from weightsync.plan.formats import Format
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
        segments = [
            Segment(meta.name, whole.box, meta.name.replace(".", "_"), 0, whole.strides)
            for meta, whole in ((meta, Segment.whole(meta)) for meta in stored)
        ]
        shapes = {meta.name: meta.shape for meta in stored}
        self._places = StoredPlaces(segments, dict(parameters_of(self.live)), shapes, self.formats)
        self.num_loads = 0
        self.swaps = False

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

    monkeypatch.setattr(quantizing_sink, "can_quantize", can_quantize)
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
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 0, "e1": 2}
        assert "0.weight was written, and live memory holds other bytes" in report.failures["e0"]
        assert loop.fleet.engines["e0"].record.state is EngineState.STALE

    drive(work)
