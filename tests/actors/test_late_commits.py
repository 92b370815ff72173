"""An engine whose commit ends too late is not written while it serves."""

from __future__ import annotations

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.late_engine import TIMEOUT_S, Late
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState

WIDTH = 64


@pytest.mark.faults
def test_a_commit_that_ends_late_ends_before_the_engine_is_filled_again(cluster: None) -> None:
    trainer = spawn(Trainer, WIDTH, "0")
    engines = {"e0": spawn(Late, WIDTH, "e0", "a"), "e1": spawn(Engine, WIDTH, "e1", "b")}
    with WeightSync(SyncConfig(bucket_bytes=64 << 10, timeout_s=TIMEOUT_S, heal_backoff_s=0.01)) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        sync.update_weights(1)
        ray.get(trainer.train.remote(2))
        report = sync.update_weights(2)
        assert report.engines["e1"] == 2
        assert "commit: no answer" in report.failures["e0"]
        sync.settle(patient(60))
        assert sync.engine_states()["e0"] is EngineState.SERVING
        assert ray.get(engines["e0"].mixes.remote()) == []
        wanted, held = ray.get([trainer.weights.remote(), engines["e0"].weights.remote()])
        assert all(torch.equal(held[name], each) for name, each in wanted.items())
