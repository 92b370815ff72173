"""All engines hold a version before the first one serves it; models that are staged pause together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import ray

from tests.fleets.actors import Trainer, spawn
from tests.fleets.noting_engine import Noting
from tests.patience import patient
from weightsync import SyncConfig, WeightSync, WeightSyncError
from weightsync.testing import Fault, FaultPlan

WIDTHS = {"model": 64, "reward": 32}
STAGE_S = 1.0
SLOW_S = 0.5


def engines(*names: str, width: int = 64) -> dict[str, Any]:
    return {name: spawn(Noting, width, name) for name in names}


def notes(of: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {name: dict(ray.get(engine.notes.remote())) for name, engine in of.items()}


@pytest.mark.faults
def test_no_engine_serves_before_the_slowest_has_the_version() -> None:
    fleet = engines("e0", "e1", "e2")
    with WeightSync(SyncConfig(bucket_bytes=4096, timeout_s=patient(10))) as sync:
        sync.register_trainers([spawn(Trainer, 64, "t")])
        sync.register_engines(fleet)
        sync.connect()
        for version in (1, 2):
            ray.get(fleet[f"e{version}"].slow_down.remote(SLOW_S))
            sync.update_weights(version)
            found = notes(fleet)
            held = max(each["loaded"] for each in found.values())
            assert held < min(each[f"serves {version}"] for each in found.values())
            assert held - min(each["paused"] for each in found.values()) > SLOW_S


@pytest.mark.parametrize("stage", ["host", pytest.param("none", marks=pytest.mark.faults)])
def test_engines_of_all_models_pause_once_all_models_are_staged(stage: Any) -> None:
    """Else those of a quick model would wait, paused, for the bytes of a slow one. One may stage nothing."""
    config = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), stage="host")
    with WeightSync(config) as policy:
        syncs = {"model": policy}
        syncs["reward"] = policy.add_model("reward", SyncConfig(bucket_bytes=4096, stage=stage))
        fleets = {}
        for model, sync in syncs.items():
            fleets[model] = engines(f"{model}-0", width=WIDTHS[model])
            sync.register_trainers([spawn(Trainer, WIDTHS[model], f"{model}-t")])
            sync.register_engines(fleets[model])
        policy.connect()
        policy.update_weights(components=[*syncs])
        fleet = {**fleets["model"], **fleets["reward"]}
        notes(fleet)
        slow = Fault(process="holder 0", action="slow", seconds=STAGE_S, at="stage", version=2)
        policy.inject(FaultPlan((slow,)))
        begun = time.monotonic()
        report = policy.update_weights(2, components=[*syncs])
        assert report.components["model"].phases["stage"] >= STAGE_S
        found = notes(fleet)
        held = max(each["loaded"] for each in found.values())
        assert held < min(each["serves 2"] for each in found.values())
        paused = min(each["paused"] for each in found.values())
        assert paused - begun >= STAGE_S, "nobody is paused while the model is staged"
        policy.inject(FaultPlan((Fault(process="holder 0", action="error", at="stage", version=3),)))
        with pytest.raises(WeightSyncError, match="holder 0"):
            policy.update_weights(3, components=[*syncs])
        assert notes(fleet) == {name: {} for name in fleet}, "what fails before all are staged pauses nobody"
        assert all([*sync.serving()] == [*fleets[model]] for model, sync in syncs.items())
