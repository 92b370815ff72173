"""What the next driver of a run makes of what it finds; actors are stood in for by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weightsync.errors import StateError
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.fleet.survival import actor_options, begun, read_back, take_trainers
from weightsync.recipes.inputs import SHIPPED
from weightsync.recipes.report.run_report import RunReport, StepRow
from weightsync.report import HealReport

HEAL = HealReport(
    engine="main-0",
    cause="killed",
    version=2,
    died_at=100.0,
    respawned_at=None,
    serving_at=101.0,
    bytes_from={"holder 0": 4096},
    ways={"holder 0": "tcp"},
    gb_per_s=1.5,
    verified=True,
)
RECIPE = load_recipe(SHIPPED / "quickstart.yaml", ["trainers.count=2"])


def test_only_a_run_that_is_to_be_resumed_leaves_actors_behind() -> None:
    assert actor_options(RECIPE, "trainer 0") == {"num_cpus": 0, "max_restarts": 0}
    options = actor_options(replace(RECIPE, resume=True), "trainer 0")
    assert options["name"] == "weightsync/quickstart/trainer 0"
    assert options["namespace"] == "weightsync"
    assert options["lifetime"] == "detached"


def test_trainers_are_all_there_in_order_or_the_missing_one_is_named() -> None:
    left: dict[str, Any] = {"engine main-0": "e0", "trainer 1": "t1", "trainer 0": "t0"}
    assert list(take_trainers(left, RECIPE).items()) == [("trainer 0", "t0"), ("trainer 1", "t1")]
    assert take_trainers({}, RECIPE) == {}
    del left["trainer 1"]
    with pytest.raises(StateError, match=r"^trainer 1 of run quickstart is gone, and with it the state"):
        take_trainers(left, RECIPE)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ([], "start 2 trainers and 2 engines"),
        (["trainer 0", "trainer 1", "engine e0", "engine e1"], "take over 2 trainers and 2 engines"),
        (["trainer 0", "trainer 1", "engine e1"], "take over 2 trainers and 1 engine, start 1 engine"),
    ],
)
def test_what_is_taken_over_is_not_said_to_start(left: list[str], says: str) -> None:
    assert begun(RECIPE, ["e0", "e1"], left) == says


def test_a_report_goes_on_from_the_earlier_drivers(tmp_path: Path) -> None:
    row = StepRow(
        step=1,
        version=2,
        reward=0.25,
        sync_seconds=0.01,
        bytes=4096,
        verified=True,
        engines={"main-0": 2},
        rollout_versions=[1],
    )
    path = tmp_path / "report.json"
    earlier = RunReport(name="x", seed=0, started="then", steps=[row], heals=[HEAL])
    later = RunReport(name="x", seed=0)
    read_back(path, later)
    assert later.steps == []
    earlier.write(path)
    read_back(path, later)
    assert (later.started, later.steps, later.heals) == ("then", [row], [HEAL])
    assert later.status == "running"
