"""Engines that convert tensors, with trainers read in place: copies of their parameters bring them back.

Ranks, holders and the driver are real; device memory is host memory here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.fleets.direct import Direct, Shared, Staging
from tests.fleets.direct import drive as drive_direct
from tests.fleets.loop import CONFIG
from tests.fleets.rank_engine import RankEngine
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.updating.controller import Controller
from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.live_digest import LiveParameters
from weightsync.engines.rank.rank import Rank
from weightsync.errors import EngineError, ReadError, StateError, VerifyError
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.send_buffer import SendBuffer
from weightsync.holder.staging import HostStaging
from weightsync.memory.tensors import meta_of
from weightsync.plan import Plan
from weightsync.protocol.device_memory import Export, LiveExport, LiveMemory
from weightsync.protocol.messages import LiveDigest
from weightsync.report import SyncReport
from weightsync.testing import LocalEngine

CPU = torch.device("cpu")


class Packing(Rank):
    """A rank whose loader packs each tensor into int8. It shares its parameters as a rank on a GPU does.

    Attributes:
        shared: where the ranks of a test do.
    """

    shared: Shared

    def __init__(self, model: nn.Module, shared: Shared) -> None:
        self.host = Host(model)
        Packing.shared = shared
        super().__init__("test", 0, CPU, self.host)


def export(parameters: LiveParameters) -> LiveMemory:
    memory = Packing.shared.export(dict(parameters.model.named_parameters()))
    return LiveMemory(parameters.digest().kind, memory)


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveParameters, "can_export", True)
    monkeypatch.setattr(LiveParameters, "export", export)


class Host:
    def __init__(self, model: nn.Module) -> None:
        self._tensors = model.state_dict()
        self.packed = nn.ParameterDict(
            {name.replace(".", "_"): packed(torch.zeros_like(each)) for name, each in self._tensors.items()}
        )
        self.num_loads = 0
        self.packs_twice = False

    def checkpoint(self) -> Checkpoint:
        metas = tuple(meta_of(name, each) for name, each in self._tensors.items())
        return Checkpoint(metas, (), frozenset(), "4 become int8")

    def stored_otherwise(self) -> str:
        return "it packs what it loads"

    def converted(self) -> nn.Module:
        return self.packed

    def places(self) -> None: ...

    def loader(self, stored: bool) -> Host:
        self.num_loads += 1
        return self

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            held = self.packed[name.replace(".", "_")].data
            held.add_(packed(tensor)) if self.packs_twice else held.copy_(packed(tensor))

    def finish(self) -> None: ...

    def abandon(self) -> None: ...

    def model(self) -> nn.Module:
        return self.packed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("layouts of such engines are not traced")


def packed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter((tensor.detach() * 100).to(torch.int8), requires_grad=False)


class Engine(RankEngine):
    rank: Packing

    @property
    def host(self) -> Host:
        return self.rank.host

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        return self.host.packed.state_dict()


class Copying(Staging):
    """Staging of an engine's holder, which maps its parameters and writes no tensor."""

    writes = False  # type: ignore[misc]

    def link(self, engine: Export | LiveExport | None) -> None:  # type: ignore[override]
        self.flat = None
        if isinstance(engine, LiveExport):
            handles = engine.memory.handles().items()
            self.flat = FlatSnapshot({name: self.shared.buffer(each) for name, each in handles})  # type: ignore[assignment]


class Fleet(Direct):
    def __init__(self, config: SyncConfig = CONFIG) -> None:
        super().__init__(config)
        for name in self.engines:
            self.start(name)

    def start(self, name: str) -> None:
        """Start the engine's process, or another in its place: it holds zeros."""
        engine = self.engines[name] = Engine(name, {})
        engine.rank = Packing(self.model, self.source.shared)
        self.fleet.engines[name].peer = LocalEngine(engine)
        self.fleet.engines[name].attached = False

    def engine(self, name: str) -> Engine:
        engine = self.engines[name]
        assert isinstance(engine, Engine)
        return engine

    def stage(
        self, holder: int, plan: Plan, index: int, send_buffer: SendBuffer | None, receives: bool
    ) -> HostStaging:
        if not holder:
            return super().stage(holder, plan, index, send_buffer, receives)
        made = Copying(plan, index, send_buffer, receives)
        made.written, made.begun, made.shared = [], self.begun, self.source.shared
        return made

    async def update(self, version: int) -> SyncReport:
        self.train()
        report = await self.controller.update(version)
        await self.controller.snapshot_index.settled()
        return report

    async def respawn(self, name: str) -> None:
        self.engines[name].close()
        self.start(name)
        self.controller.engine_group.enter([name], EngineState.DEAD)
        self.fleet.engines[name].record = type(self.fleet.engines[name].record)()
        await self.controller.adopt(name)


def drive(work: Callable[[Fleet], Coroutine[object, object, None]], config: SyncConfig = CONFIG) -> None:
    async def typed(loop: Direct) -> None:
        assert isinstance(loop, Fleet)
        await work(loop)

    drive_direct(typed, config, cls=Fleet)


def test_a_new_process_gets_the_parameters_that_its_loader_had_made() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            report = await loop.update(version)
        assert report.proofs == dict.fromkeys(
            ("e0", "e1"), "what its loader got, and live weights with 1 engine alike"
        )
        served = {name: each.clone() for name, each in loop.engine("e1").held.items()}
        loop.train()  # trainers go on
        for name in ("e1", "e0"):
            await loop.respawn(name)
            assert loop.controller.can_refill(name)
            report = await loop.controller.refill(name)
            assert (report.engines[name], report.verified) == (2, True)
            assert report.proofs[name] == "live weights with what its loader had made of them"
            assert sum(report.bytes_from.values()) == sum(each.nbytes for each in served.values())
            assert loop.engine(name).host.num_loads == 0
            assert all(torch.equal(each, loop.engine(name).held[n]) for n, each in served.items())
        assert (await loop.update(3)).engines == {"e0": 3, "e1": 3}
        assert loop.engine("e0").host.num_loads == 1

    drive(work)


def test_without_copies_a_new_process_gets_the_parameters_of_an_engine_that_serves() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        served = {name: each.clone() for name, each in loop.engine("e0").held.items()}
        loop.train()
        await loop.respawn("e1")
        report = await loop.controller.refill("e1")
        assert (report.engines, report.ways) == ({"e0": 1, "e1": 1}, {"holder 1": "zeromq"})
        assert report.proofs["e1"] == "live weights with what its loader had made of them"
        assert loop.engine("e1").host.num_loads == 0
        assert all(torch.equal(each, loop.engine("e1").held[n]) for n, each in served.items())
        await loop.respawn("e0")
        next(iter(loop.engine("e1").held.values()))[0] ^= 1
        with pytest.raises(VerifyError, match="live parameters of rank 0"):
            await loop.controller.refill("e0")

    drive(work, replace(CONFIG, keep_versions=1))


def test_a_copy_with_a_bit_that_flipped_serves_nowhere() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        (share,) = loop.holders[1].snapshots()
        store = loop.holders[1].snapshot_store
        assert store is not None
        held = store.held(share.header)
        assert held is not None
        held.bytes[-1] ^= 1
        await loop.respawn("e1")
        with pytest.raises(ReadError, match=r"holder 1 .* wrong bytes"):
            await loop.controller.refill("e1")
        assert loop.fleet.engines["e1"].record.state is EngineState.STALE

    drive(work)


def test_a_driver_that_took_over_knows_what_the_copies_have_to_be() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        served = {name: each.clone() for name, each in loop.engine("e1").held.items()}
        loop.train()
        loop.controller = Controller(CONFIG, loop.fleet)
        await loop.controller.connect()
        assert await loop.controller.restore() == []
        await loop.respawn("e1")
        assert (await loop.controller.refill("e1")).engines["e1"] == 1
        assert all(torch.equal(each, loop.engine("e1").held[n]) for n, each in served.items())

    drive(work)


def test_copies_that_nothing_is_known_of_serve_nowhere() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        other = np.zeros((1, 3), np.uint64)
        loop.controller.snapshot_index.live.learn(other, 0, LiveDigest("kind", "digest"))  # of other tensors
        await loop.respawn("e1")
        with pytest.raises(ReadError, match=r"holder 1 .* wrong bytes"):
            await loop.controller.refill("e1")

    drive(work)


def test_an_engine_of_another_kind_is_not_filled() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        other = SimpleNamespace(packed=nn.ParameterDict({"w": packed(torch.ones(3))}))
        loop.engines["e1"].close()
        loop.start("e1")
        loop.engine("e1").host.packed = other.packed
        loop.fleet.engines["e1"].record = type(loop.fleet.engines["e1"].record)()
        await loop.controller.adopt("e1")
        assert not loop.controller.can_refill("e1")
        with pytest.raises(StateError, match="no holder keeps"):
            await loop.controller.refill("e1")

    drive(work)


def test_an_engine_in_which_an_equal_update_changes_bytes_does_not_serve() -> None:
    async def work(loop: Fleet) -> None:
        await loop.controller.connect()
        await loop.update(1)
        for name in ("e0", "e1"):
            loop.engine(name).host.packs_twice = True
        with pytest.raises(EngineError, match="made other live bytes of the same tensors"):
            await loop.controller.update(2)

    drive(work)
