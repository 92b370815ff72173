"""Frozen tensors travel with the first update, and are compared in all."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from tests.fleets.direct import Direct
from tests.fleets.loop import CONFIG, Loop
from weightsync.config import SyncConfig
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import EngineMember
from weightsync.errors import ConfigError, PlanError, StateError
from weightsync.sources.module import ModuleSource
from weightsync.testing import DictEngine, LocalEngine, LocalTrainer

FROZEN = ["0.weight", "0.bias"]


class Frozen(Loop):
    """A fleet in host memory; the first layer of its model is frozen."""

    frozen = ("0.*",)

    def train(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name not in FROZEN:
                    parameter.normal_()


class FrozenDirect(Direct):
    """The same, read and written directly."""

    frozen, train = ("0.*",), Frozen.train


@pytest.fixture(params=[Frozen, FrozenDirect])
def loop(request: pytest.FixtureRequest):
    made = request.param(CONFIG)
    yield made
    made.close()


def written(loop: Loop) -> set[str]:
    """Make a set of the tensors that are written to the first engine from now on."""
    names: set[str] = set()
    loop.engines["e0"].on_write = names.add
    return names


def test_they_travel_once(loop) -> None:
    async def work() -> None:
        await loop.controller.connect()
        total = sum(tensor.nbytes for tensor in loop.model.state_dict().values())
        first, *later = [await update(loop, version) for version in (1, 2, 3)]
        assert first.nbytes == total
        assert {report.nbytes for report in later} == {4 * (30 * 5 + 5)}

    asyncio.run(work())


async def update(loop, version):
    loop.train()
    report = await loop.controller.update(version)
    assert report.engines == {"e0": version, "e1": version}
    assert loop.holds_the_models_weights("e0")
    assert loop.holds_the_models_weights("e1")
    return report


def test_buckets_of_frozen_tensors_are_left_out() -> None:
    async def work(loop: Frozen) -> None:
        await loop.controller.connect()
        assert (await update(loop, 1)).num_buckets > 1
        names = written(loop)
        assert (await update(loop, 2)).num_buckets == 1
        assert names == {"1.weight", "1.bias"}

    run(work)


def run(work) -> None:
    loop = Frozen(CONFIG)
    try:
        asyncio.run(work(loop))
    finally:
        loop.close()


def test_one_that_changed_at_the_trainer_is_refused_until_the_next_connect(loop) -> None:
    async def work() -> None:
        await loop.controller.connect()
        await update(loop, 1)
        with torch.no_grad():
            loop.model.get_parameter("0.bias").add_(1)
        with pytest.raises(StateError, match=r"0\.bias is frozen, and changed since version 1.*connect\(\)"):
            await loop.controller.update(2)
        assert {m.record.state for m in loop.fleet.engines.values()} == {EngineState.SERVING}
        await loop.controller.connect()
        await update(loop, 2)

    asyncio.run(work())


def test_one_that_changed_in_an_engine_is_found_and_sent_again(loop) -> None:
    async def work() -> None:
        await loop.controller.connect()
        await update(loop, 1)
        loop.engines["e1"].tensors["0.weight"].add_(1)
        loop.train()
        report = await loop.controller.update(2)
        assert report.engines == {"e0": 2, "e1": 0}
        assert "0.weight" in report.failures["e1"]
        if not loop.controller.connected:
            await loop.controller.connect()
        await update(loop, 3)

    asyncio.run(work())


def test_an_engine_that_comes_later_gets_them() -> None:
    async def work(loop: Frozen) -> None:
        await loop.controller.connect()
        await update(loop, 1)
        zeros = {name: torch.zeros_like(t) for name, t in loop.model.state_dict().items()}
        loop.engines["e1"].close()
        loop.engines["e1"] = DictEngine("e1", zeros)
        loop.fleet.engines["e1"] = EngineMember(LocalEngine(loop.engines["e1"]), (2,))
        await loop.controller.adopt("e1")
        names = written(loop)
        await update(loop, 2)
        assert names >= set(FROZEN)
        names.clear()
        await update(loop, 3)
        assert names.isdisjoint(FROZEN)

    run(work)


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    class Typo(Frozen):
        frozen = ("zero.*",)

    loop = Typo(CONFIG)
    with pytest.raises(ConfigError, match=r"frozen.*zero\.\*"):
        asyncio.run(loop.controller.connect())
    loop.close()


class WithTower(Loop):
    """A trainer that has the second layer alone, and one more that has the first one, which nobody trains."""

    def __init__(self, config: SyncConfig) -> None:
        super().__init__(config)
        self.tower = ModuleSource(self.model[0], names={"": "0."}, frozen=["*"])
        self.fleet.trainers.append((LocalTrainer(self.tower), 1))

    def source_of(self, model: nn.Module) -> ModuleSource:
        return ModuleSource(model[1], names={"": "1."})

    train = Frozen.train

    def close(self) -> None:
        self.tower.close()
        super().close()


def test_one_more_trainer_has_a_tower_that_the_others_lack() -> None:
    async def work() -> None:
        with pytest.raises(
            PlanError, match=r"0\.weight: .*If nobody trains 0\.\* \(2 tensors\), register one"
        ):
            await alone.controller.connect()
        await loop.controller.connect()
        first, *later = [await update(loop, version) for version in (1, 2, 3)]
        assert first.nbytes == sum(tensor.nbytes for tensor in loop.model.state_dict().values())
        assert {report.nbytes for report in later} == {4 * (30 * 5 + 5)}
        loop.engines["e0"].tensors["0.bias"].add_(1)
        loop.train()
        report = await loop.controller.update(4)
        assert report.engines == {"e0": 0, "e1": 4}
        assert "0.bias" in report.failures["e0"]

    alone, loop = WithTower(CONFIG), WithTower(CONFIG)
    del alone.fleet.trainers[1]
    try:
        asyncio.run(work())
    finally:
        alone.close()
        loop.close()
