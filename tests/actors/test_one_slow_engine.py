"""One engine of three that is slow for ever, through the public door."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Slowing, Trainer, spawn
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState

pytestmark = pytest.mark.timeout(120)
WIDTH = 64
TIMEOUT_S = patient(1.5)
CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=TIMEOUT_S,
    connect_timeout_s=patient(60),
    heartbeat_s=patient(60),
    heal_backoff_s=0.05,
)


@pytest.mark.faults  # test_slow_engines holds it over real holders and sockets, without Ray
@pytest.mark.parametrize("num_updates", [5, 20])
@pytest.mark.parametrize(
    ("seconds", "respawns"),
    [
        pytest.param(10_000.0, True, id="stuck"),
        pytest.param(1.5 * TIMEOUT_S, True, id="slow"),
        pytest.param(10_000.0, False, id="not respawned"),
    ],
)
def test_one_slow_engine_costs_the_others_no_version(
    num_updates: int, seconds: float, respawns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    engines = {name: spawn(Slowing, WIDTH, name, f"slow-{name}") for name in ("e0", "e1", "e2")}
    trainer = spawn(Trainer, WIDTH, "slow-trainer")

    def respawn(name: str) -> Any:
        engines[name] = spawn(Engine, WIDTH, name, f"slow-{name}")
        return engines[name]

    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines, respawn=respawn if respawns else None)
        sync.connect()
        begun = time.monotonic()
        sync.update_weights(1)
        undisturbed = time.monotonic() - begun
        ray.get(engines["e1"].slow_down.remote(seconds))
        took = []
        for version in range(2, 2 + num_updates):
            begun = time.monotonic()
            report = sync.update_weights(version)
            took.append(time.monotonic() - begun)
            assert report.engines["e0"] == report.engines["e2"] == version, report
            assert set(report.failures) <= {"e1"}, report
        assert all(each < undisturbed + TIMEOUT_S for each in took), took
        assert all(each < TIMEOUT_S / 2 for each in took[2:]), took
        sync.settle(patient(60))
        healed = EngineState.SERVING if respawns else EngineState.DEAD
        assert sync.engine_states()["e1"] is healed
        logging.getLogger("weightsync").warning("updates took %s", took)
    for actor in (*engines.values(), trainer):
        ray.kill(actor)
