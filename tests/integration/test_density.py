"""Reports say how much changed, by a sample, in every way of moving bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.fleets.loop import CONFIG, Loop, drive
from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.density import group
from weightsync.report import Density
from weightsync.sources.density import EVERY

SAMPLED = replace(CONFIG, density=True, bucket_bytes=1 << 20)


class Large(Loop):
    """Has layers that are large enough for a sample of part of them."""

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(300, 1000, bias=False) for _ in range(3)).append(nn.LayerNorm(300))

    def change(self, fraction: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += torch.rand_like(parameter) < fraction


@pytest.mark.parametrize("stage", ["none", "host"])
def test_fractions_and_bytes_are_those_of_a_comparison_of_all(stage: str) -> None:
    async def work(loop: Loop) -> None:
        assert isinstance(loop, Large)
        await loop.controller.connect()
        assert (await loop.controller.update(1)).density == {}
        for version, fraction in enumerate((0.0, 0.01, 0.2, 1.0), 2):
            old = [each.detach().clone().numpy() for each in loop.model.parameters()]
            loop.change(fraction)
            report = await loop.controller.update(version)
            assert {*report.density} == {"*.weight", "*.bias"}
            found = report.density["*.weight"]
            pairs = [*zip(old, (each.detach().numpy() for each in loop.model.parameters()), strict=True)]
            weights = [(a, b) for a, b in pairs if a.ndim == 2]
            assert found.changed == pytest.approx(np.mean([(a != b).mean() for a, b in weights]), abs=0.02)
            assert found.num_sampled == pytest.approx(900_000 / EVERY, rel=0.2)
            assert found.nbytes == 4 * (900_000 + 300)
            whole = sum(delta_nbytes(a, b) for a, b in weights)
            assert found.delta_nbytes == pytest.approx(whole, rel=0.1, abs=4000)
            assert report.metrics()["weightsync/delta_nbytes"] >= found.delta_nbytes

    drive(work, replace(SAMPLED, stage=stage), Large)  # type: ignore[arg-type]


def delta_nbytes(old: np.ndarray, new: np.ndarray) -> int:
    return Changes.between(
        (Span(0, old.nbytes, 4),), old.view(np.uint8).ravel(), new.view(np.uint8).ravel()
    ).nbytes


def test_what_travels_is_compared_and_not_what_is_trained() -> None:
    """Engines take bfloat16, in which steps of 1e-5 of a weight are lost."""

    async def work(loop: Loop) -> None:
        assert isinstance(loop, Narrow)
        await loop.controller.connect()
        await loop.controller.update(1)
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter *= 1 + 1e-5
        report = await loop.controller.update(2)
        assert report.density["*.weight"].changed < 0.02

    class Narrow(Large):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            for engine in self.engines.values():
                engine.tensors.update({name: each.bfloat16() for name, each in engine.tensors.items()})

    drive(work, SAMPLED, Narrow)


def test_without_the_setting_nothing_is_sampled() -> None:
    async def work(loop: Loop) -> None:
        await loop.controller.connect()
        for version in (1, 2):
            assert (await loop.controller.update(version)).density == {}

    drive(work, CONFIG)


def test_names_are_grouped_by_their_numbers() -> None:
    assert (
        group("model.layers.17.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    )
    assert Density(0.5, 10, 40, 30).changed == 0.5
