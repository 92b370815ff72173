"""Fleets whose engines are quantised in place after the first update, with doubles of the kernels."""

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
from tests.quantised import same_bits
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.engines.loading.whole_sink import Loader
from weightsync.engines.quantised.quantizing_loader import QuantizingLoader, stored_tensors
from weightsync.engines.quantised.stored_loader import StoredLoader
from weightsync.engines.rank.rank import Rank
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.memory.tensors import meta_of
from weightsync.plan import Plan, Segment
from weightsync.plan.layout.formats import Format
from weightsync.protocol.device_memory import DeviceMemory, LiveExport, LiveMemory
from weightsync.protocol.handles import DeviceHandle
from weightsync.quantising.piece_memory import SlotPieces
from weightsync.quantising.quantize import quantize
from weightsync.quantising.quantizing_tables import QuantizingTables
from weightsync.quantising.stored_places import StoredPlaces
from weightsync.testing import LocalEngine

CPU = torch.device("cpu")
INT8 = Format(rule="compressed-tensors", values="int8", block=(1, 0))


class Host:
    """A model that stores matrices in int8, with a loader that only copies what it gets."""

    def __init__(self, model: nn.Module) -> None:
        metas = tuple(meta_of(name, each) for name, each in model.state_dict().items())
        self._own_checkpoint = Checkpoint(metas, (), frozenset(), "2 become int8")
        self.formats = {meta.name: INT8 for meta in metas if len(meta.shape) == 2}
        self.stored = stored = tuple(stored_tensors(self._own_checkpoint, self.formats))
        self._own_checkpoint = replace(self._own_checkpoint, stored=stored)
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
        return self._own_checkpoint

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


class Staging(DirectStaging):
    """Staging that quantises buckets into an engine rank's memory."""

    live: Mapping[str, torch.Tensor]
    buckets: list[int]
    plan: Plan
    scratch: list[torch.Tensor]
    can_quantize = True
    writes = False
    tables: QuantizingTables | None = None

    @property
    def quantizing(self) -> QuantizingTables | None:  # type: ignore[override]
        return self.tables

    def link(self, engine: LiveExport | None) -> None:  # type: ignore[override]
        if engine and engine.places and self.can_quantize:
            memory = {name: each.detach().view(-1).view(torch.uint8) for name, each in self.live.items()}
            self.scratch = []
            self.make_tables(StoredPlaces.of(engine.places, memory))

    def make_tables(self, places: StoredPlaces) -> None:
        pieces = SlotPieces(self.plan, [slot.tensor for slot in self._slots])
        self.tables = QuantizingTables(self.plan, pieces, places, places.formats)
        self.scratch.append(torch.empty(self.tables.nbytes, dtype=torch.uint8))
        self.tables.bind(self.scratch[-1])

    def write(self, bucket: int) -> None:
        self.buckets.append(bucket)
        assert self.tables
        self.tables.run(bucket, torch.cuda.current_stream())


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


def use_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engine ranks export live memory as on a GPU."""
    monkeypatch.setattr(LiveParameters, "can_export", True)
    memory = DeviceMemory.of({"a": DeviceHandle("cuda:fake", 0, b"", 0, 1)})
    monkeypatch.setattr(LiveParameters, "export", lambda _: LiveMemory("alike", memory))


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
