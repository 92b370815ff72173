"""A fleet whose engines quantise in place after the first update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop
from tests.fleets.loop import drive as drive_loop
from tests.fleets.quantising import Fleet, drive, refuse_to_serve, stored_of
from tests.kernel_doubles import use_doubles
from weightsync.config import SyncConfig
from weightsync.plan.layout.formats import Format
from weightsync.quantising import quantizing_tables
from weightsync.quantising.stored_places import StoredPlaces
from weightsync.sources.module import ModuleSource
from weightsync.testing import LocalTrainer


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


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
