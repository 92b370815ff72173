"""What a run says that it runs on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from weightsync.errors import ConfigError
from weightsync.recipes import inputs
from weightsync.recipes.config.recipe import EngineSpec, Recipe, TrainerSpec
from weightsync.recipes.fleet import launcher
from weightsync.recipes.fleet.launcher import Launcher


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"GPU": 2.0, "accelerator_type:H200": 1.0}, "2 GPUs (H200)"),
        ({"GPU": 4.0, "accelerator_type:H200": 1.0, "accelerator_type:A100": 1.0}, "2 GPUs (A100, H200)"),
        ({"GPU": 2.0}, "2 GPUs"),
        ({"GPU": 1.0, "accelerator_type:H200": 1.0}, "CPUs (2 GPUs wanted, 1 there)"),
        ({}, "CPUs (no GPUs here)"),
    ],
)
def test_devices_are_named(monkeypatch: pytest.MonkeyPatch, there: dict[str, float], said: str) -> None:
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(launcher, "_reserve", lambda recipe: object())
    recipe = Recipe(name="it", engines={"main": EngineSpec(kind="torch", count=2)})
    assert str(Launcher(recipe, Path("model"))) == said


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_engines_that_start_on_gpus_only_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    monkeypatch.setattr(launcher.ray, "cluster_resources", lambda: {"GPU": float(num_gpus)})
    monkeypatch.setattr(launcher, "choose_engine", lambda kind: ("vllm", "it is installed"))
    monkeypatch.setattr(launcher.torch.version, "cuda", "13.0")
    recipe = Recipe(name="it", engines={"main": EngineSpec(kind="auto", count=2)})
    with pytest.raises(ConfigError) as refused:
        Launcher(recipe, Path("model"))
    assert refused.value.field == "engines.main.kind"
    assert f"the recipe wants 2 GPUs, the cluster has {num_gpus}" in str(refused.value)
    assert "--set trainers.count=1 --set engines.main.count=1" in str(refused.value)


@pytest.mark.parametrize("kind", ["deepspeed", "megatron"])
def test_a_trainer_that_is_not_installed_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    refused = rf"trainers\.kind: '{kind}' is not valid; .*pip install 'weightsync\[{kind}\]'"
    with pytest.raises(ConfigError, match=refused):
        inputs.runnable_recipe("quickstart", [f"trainers.kind={kind}"])
    assert inputs.runnable_recipe("quickstart", ["trainers.kind=plain"]).trainers.kind == "plain"


def test_slots_go_round_the_hosts_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    east, west, mine = ("e" * 56, "a" * 56, "b" * 56)  # as Ray's ids of nodes
    addresses = {east: "10.0.0.3", west: "10.0.0.2", mine: "10.0.0.9"}
    alive = {east, west, mine}
    monkeypatch.setattr(launcher.ray, "cluster_resources", dict)
    monkeypatch.setattr(
        launcher.ray,
        "nodes",
        lambda: [
            {"NodeID": node, "NodeManagerAddress": address, "Alive": node in alive}
            for node, address in addresses.items()
        ],
    )
    monkeypatch.setattr(
        launcher.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: mine)
    )
    recipe = Recipe(
        name="it", trainers=TrainerSpec(count=1), engines={"main": EngineSpec(kind="torch", count=4)}
    )
    made = Launcher(recipe, Path("model"))

    def hosts() -> list[str]:
        return [made.options(process)["scheduling_strategy"].node_id for process in recipe.devices]

    assert hosts() == [mine, mine, west, east, mine]
    alive.remove(west)
    assert hosts() == [mine, mine, east, mine, east]
    alive.remove(east)
    assert "scheduling_strategy" not in made.options("engine main-1"), "one host needs no choice"
