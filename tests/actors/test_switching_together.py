"""All engines of a fleet or of a deployment have a version before the first one serves the version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.fleets.noting_engine import Noting
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, VerifyError, WeightSync
from weightsync.errors import PeerError, PeerLostError, TransportError, WeightSyncError
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


WIDTH = 64
NAMES = ("p0", "d0", "e0")
DEPLOYMENTS = {"pd0": ["p0", "d0"]}
CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=patient(2), connect_timeout_s=patient(30), heal_backoff_s=0.1
)


def start(name: str) -> Any:
    return spawn(Noting, WIDTH, name)


@pytest.fixture
def sync() -> Iterator[WeightSync]:
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([spawn(Trainer, WIDTH, "t")])
        sync.register_engines({name: start(name) for name in NAMES}, start, DEPLOYMENTS)
        sync.connect()
        sync.update_weights(1)
        assert [*sync.serving()] == [*NAMES]
        ray.get([engine.notes.remote() for engine in sync.engines().values()])
        yield sync


def notes_of(sync: WeightSync, name: str) -> dict[str, float]:
    return dict(ray.get(sync.engines()[name].notes.remote()))


@pytest.mark.parametrize("action", ["corrupt", pytest.param("kill", marks=pytest.mark.faults)])
def test_an_engine_waits_with_its_version_until_its_whole_deployment_has_it(
    sync: WeightSync, action: Any
) -> None:
    sync.inject(FaultPlan((Fault(process="engine d0", action=action, at="move", version=2),)))
    report = sync.update_weights(2)
    assert (report.states["p0"], report.states["e0"]) == ("READY", "SERVING")
    assert (report.engines["p0"], report.engines["e0"]) == (2, 2)
    assert until(lambda: [*sync.serving()] != ["e0"], patient(30))
    assert [*sync.serving()] == [*NAMES], "both are handed out again at once"
    assert sync.engine_versions() == dict.fromkeys(NAMES, 2)
    first, second = notes_of(sync, "p0"), notes_of(sync, "d0")
    assert first["loaded"] < second["loaded"] < first["serves 2"], "it had waited for the other"
    assert sync.update_weights(3).engines == dict.fromkeys(NAMES, 3)
    sync.settle(patient(30))
    (heal,) = sync.heals
    assert (heal.engine, heal.version, heal.verified) == ("d0", 2, True)


@pytest.mark.faults
def test_a_deployment_stays_with_its_version_if_one_of_its_engines_does_not_pause(sync: WeightSync) -> None:
    slow = Fault(process="engine d0", action="slow", seconds=CONFIG.timeout_s + 4, at="pause", version=2)
    sync.inject(FaultPlan((slow,)))
    report = sync.update_weights(2)
    assert report.engines == {"p0": 1, "d0": 1, "e0": 2}
    assert report.states["p0"] == "SERVING"
    assert [*sync.serving()] == ["e0"]
    assert "loaded" not in notes_of(sync, "p0")
    assert until(lambda: {*sync.serving(any_version=True)} == {*NAMES}, patient(30)), "d0 resumes late"
    assert sync.update_weights(3).engines == dict.fromkeys(NAMES, 3)
    assert [*sync.serving()] == [*NAMES]


def test_a_deployment_that_is_not_whole_does_not_commit_a_version() -> None:
    trainer = spawn(Trainer, WIDTH, "t")
    with WeightSync(SyncConfig(bucket_bytes=4096, timeout_s=patient(10), heal_attempts=0)) as sync:
        engines = {name: start(name) for name in ("p0", "d0")}
        sync.register_trainers([trainer])
        for wrong, message in (
            ({"pd0": ["p0", "d1"]}, "'d1' is not valid; did you mean 'd0'"),
            ({"pd0": ["p0"], "pd1": ["p0", "d0"]}, "'p0' is not valid; it is in deployment 'pd0' already"),
            ({"pd0": "p0"}, "give a list of names"),
            (["p0", "d0"], "give a dict of names to engines"),
        ):
            with pytest.raises(ConfigError, match=rf"deployments.*{message}"):
                sync.register_engines(engines, deployments=wrong)  # type: ignore[arg-type]
        sync.register_engines(engines, deployments=DEPLOYMENTS)
        sync.connect()
        sync.update_weights(1)
        ray.get(trainer.train.remote(2))
        sync.inject(FaultPlan((Fault(process="engine d0", action="corrupt", at="move", version=2),)))
        with pytest.raises(VerifyError, match="engine d0"):
            sync.update_weights(2)
        assert (sync.version, sync.serving()) == (1, {})
        assert "serves 2" not in notes_of(sync, "p0")
        assert sync.update_weights(3).engines == {"p0": 3, "d0": 3}
        assert [*sync.serving()] == ["p0", "d0"]


def test_an_engine_serves_once_the_one_that_it_waited_for_is_removed() -> None:
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([spawn(Trainer, WIDTH, "t")])
        sync.register_engines({name: start(name) for name in NAMES}, deployments=DEPLOYMENTS)
        sync.connect()
        sync.update_weights(1)
        sync.inject(FaultPlan((Fault(process="engine d0", action="kill", at="move", version=2),)))
        assert sync.update_weights(2).states == {"p0": "READY", "d0": "DEAD", "e0": "SERVING"}
        sync.remove_engine("d0")
        assert {*sync.serving()} == {"p0", "e0"}
        assert "serves 2" in notes_of(sync, "p0")


STAGED = SyncConfig(bucket_bytes=4096, stage="host", timeout_s=patient(10), connect_timeout_s=patient(30))


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("kill", PeerLostError),
        pytest.param("corrupt", TransportError, marks=pytest.mark.faults),
        pytest.param("error", PeerError, marks=pytest.mark.faults),
    ],
)
def test_a_fault_while_a_version_is_staged_costs_no_engine_its_version(
    action: Any, error: type[WeightSyncError]
) -> None:
    trainer = spawn(Trainer, WIDTH, "t")
    engines = {name: spawn(Engine, WIDTH, name, name) for name in ("e0", "e1")}
    with WeightSync(STAGED) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        assert sync.update_weights(1).phases["stage"] > 0
        sync.inject(FaultPlan((Fault(process="holder 0", action=action, at="stage", version=2),)))
        ray.get(trainer.train.remote(2))
        before = [ray.get(engine.weights.remote()) for engine in engines.values()]
        with pytest.raises(error, match="holder 0"):
            sync.update_weights(2)
        assert [*sync.serving()] == ["e0", "e1"]
        for engine, held in zip(engines.values(), before, strict=True):
            found = ray.get(engine.weights.remote())
            assert all((found[name] == tensor).all() for name, tensor in held.items())
        assert sync.update_weights(3).engines == {"e0": 3, "e1": 3}
        weights = ray.get(trainer.weights.remote())
        for engine in engines.values():
            found = ray.get(engine.weights.remote())
            assert all((found[name] == tensor).all() for name, tensor in weights.items())
