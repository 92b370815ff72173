"""Engines of different dtypes in one fleet: each has the trainers' values, cast once, in one commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fleets.loop import Loop, drive
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PlanError
from weightsync.protocol.messages import Attached
from weightsync.report import SyncReport

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Mixed(Loop):
    """A trainer in `trained`, e0 in `first`, e1 in `second`; buffers and frozen tensors, too."""

    trained, first, second = torch.float32, torch.bfloat16, torch.float16

    def make(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 5))
        model[1].register_buffer("routing", torch.zeros(7, 3))
        return model.to(self.trained)

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        for name, dtype in (("e0", self.first), ("e1", self.second)):
            engine = self.engines[name]
            engine.tensors = {n: t.to(dtype) for n, t in engine.tensors.items()}

    def train(self) -> None:
        super().train()
        self.model[1].get_buffer("routing").normal_()

    def holds_the_models_weights(self, name: str) -> bool:
        """Whether each byte is that of the trainers' value, cast once."""
        held = self.engines[name].tensors
        return all(torch.equal(t.to(held[n].dtype), held[n]) for n, t in self.model.state_dict().items())


@pytest.mark.parametrize("trained", FLOATS, ids=str)
@pytest.mark.parametrize("second", FLOATS, ids=str)
def test_each_engine_has_the_trainers_values_cast_once(trained: torch.dtype, second: torch.dtype) -> None:
    class Fleet(Mixed):
        first = torch.bfloat16

    Fleet.trained, Fleet.second = trained, second

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            loop.train()
            assert (await loop.controller.update(version)).engines == {"e0": version, "e1": version}
            assert loop.holds_the_models_weights("e0")
            assert loop.holds_the_models_weights("e1")

    drive(work, cls=Fleet)


def test_one_tensor_may_differ_and_the_rest_travels_as_both_engines_have_it() -> None:
    class Fleet(Mixed):
        second = torch.bfloat16

    async def work(loop: Loop) -> None:
        held = loop.engines["e1"].tensors
        held["1.weight"] = held["1.weight"].float()
        await loop.controller.connect()
        plan = loop.controller.plan
        assert plan
        dtypes = {meta.name: meta.dtype for meta in plan.tensors}
        assert {n for n, dtype in dtypes.items() if dtype == "float32"} == {"1.weight"}
        loop.train()
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}
        assert all(map(loop.holds_the_models_weights, ("e0", "e1")))

    drive(work, cls=Fleet)


def test_a_copy_fills_an_engine_of_another_dtype_by_the_same_cast() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        loop.train()
        assert (await loop.controller.update(1)).engines == {"e0": 1, "e1": 1}
        for name in loop.engines:
            for tensor in loop.engines[name].tensors.values():
                tensor.zero_()
            loop.fleet.engines[name].record.enter(EngineState.STALE)
            report = await loop.controller.refill(name)
            assert report.bytes_from
            assert report.engines == {"e0": 1, "e1": 1}
            assert all(map(loop.holds_the_models_weights, loop.engines))

    drive(work, cls=Mixed)


def test_a_bit_that_changes_after_the_cast_is_found_by_its_tensors_name() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        loop.train()
        engine = loop.engines["e1"]
        engine.finish = lambda: engine.tensors["0.weight"].view(torch.uint8)[3, 7:8].bitwise_xor_(1)  # type: ignore[method-assign]
        report = await loop.controller.update(1)
        assert report.engines["e0"] == 1
        assert "0.weight" in report.failures["e1"]
        engine.finish = lambda: None  # type: ignore[method-assign]
        assert (await loop.controller.refill("e1")).engines == {"e0": 1, "e1": 1}
        assert loop.holds_the_models_weights("e1")

    drive(work, cls=Mixed)


def test_frozen_tensors_stay_where_they_were_cast_to() -> None:
    class Fleet(Mixed):
        frozen = ("0.*",)

        def train(self) -> None:
            with torch.no_grad():
                self.model[1].weight.normal_()

    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        first, second = [await update(loop, version) for version in (1, 2)]
        assert second.nbytes < first.nbytes
        loop.engines["e1"].tensors["0.bias"][2] += 1  # what the update leaves out is compared all the same
        loop.train()
        assert "0.bias" in (await loop.controller.update(3)).failures["e1"]

    drive(work, cls=Fleet)


async def update(loop: Loop, version: int) -> SyncReport:
    loop.train()
    report = await loop.controller.update(version)
    assert report.engines == {"e0": version, "e1": version}
    assert all(map(loop.holds_the_models_weights, loop.engines))
    return report


def test_an_engine_that_does_not_cast_is_refused_by_its_name() -> None:
    async def work(loop: Loop) -> None:
        attach = loop.engines["e1"].attach

        def without(*args: object) -> list[Attached]:
            return [replace(each, casts=False) for each in attach(*args)]  # type: ignore[arg-type]

        loop.engines["e1"].attach = without  # type: ignore[method-assign, assignment]
        told = r"0\.weight: engine e1 holds it as float16, .* travels as float32.*two WeightSyncs"
        with pytest.raises(PlanError, match=told):
            await loop.controller.connect()

    drive(work, cls=Mixed)
