"""Staged updates of real actors, and a holder that is killed while it stages."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import PeerError, PeerLostError, TransportError, WeightSyncError
from weightsync.testing import Fault, FaultPlan

CONFIG = SyncConfig(bucket_bytes=4096, stage="host", timeout_s=patient(10), connect_timeout_s=patient(30))
WIDTH = 64


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
    with WeightSync(CONFIG) as sync:
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
