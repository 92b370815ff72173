"""What a run says that it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import launcher
from recipes.launcher import Launcher
from recipes.recipe import EngineSpec, Recipe


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"GPU": 2.0, "accelerator_type:H200": 1.0}, "2 GPUs (H200)"),
        ({"GPU": 4.0, "accelerator_type:H200": 1.0, "accelerator_type:A100": 1.0}, "2 GPUs (A100, H200)"),
        ({"GPU": 2.0}, "2 GPUs"),
        ({"GPU": 1.0, "accelerator_type:H200": 1.0}, "CPUs (2 GPUs wanted, 1 there)"),
        ({}, "CPUs (2 GPUs wanted, 0 there)"),
    ],
)
def test_devices_are_named(monkeypatch: pytest.MonkeyPatch, there: dict[str, float], said: str) -> None:
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(launcher, "_reserve", lambda recipe: object())
    recipe = Recipe(name="it", engines={"main": EngineSpec(kind="torch", count=2)})
    assert str(Launcher(recipe, Path("model"))) == said
