"""Engines of one deployment, such as for prefill and decode, serve one version together, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.fleets.actors import Trainer, spawn, until
from tests.fleets.noting_engine import Noting
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, VerifyError, WeightSync
from weightsync.testing import Fault, FaultPlan

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


def notes(sync: WeightSync, name: str) -> dict[str, float]:
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
    first, second = notes(sync, "p0"), notes(sync, "d0")
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
    assert "loaded" not in notes(sync, "p0")
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
        assert "serves 2" not in notes(sync, "p0")
        assert sync.update_weights(3).engines == {"p0": 3, "d0": 3}
        assert [*sync.serving()] == ["p0", "d0"]
