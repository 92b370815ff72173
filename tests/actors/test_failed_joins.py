"""An engine that does not join in place of a dead one leaves everything as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.fleets.faulty import answers
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.errors import PlanError

WIDTH = 64
CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=patient(2),
    connect_timeout_s=patient(60),
    heartbeat_s=patient(0.25),
    heal_attempts=100,
    heal_backoff_s=0.01,
)


def test_the_dead_one_is_still_healed_and_the_other_actor_lives(cluster: None) -> None:
    may_start, started = threading.Event(), list[Any]()

    def respawn(name: str) -> Any:
        if not may_start.is_set():
            raise RuntimeError("no resources yet")
        started.append(spawn(Engine, WIDTH, name, "unjoined-e1-again"))
        return started[-1]

    trainer, other = spawn(Trainer, WIDTH, "unjoined-t"), spawn(Engine, WIDTH + 1, "e1", "unjoined-other")
    engines = {name: spawn(Engine, WIDTH, name, f"unjoined-{name}") for name in ("e0", "e1")}
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines, respawn=respawn)
        sync.connect()
        sync.update_weights()
        sync.settle(patient(20))
        ray.kill(engines["e1"])
        assert until(lambda: sync.engine_states()["e1"] is EngineState.DEAD, patient(10))
        with pytest.raises(PlanError):
            sync.add_engine("e1", other)
        may_start.set()
        assert until(lambda: sync.engine_versions()["e1"] == 1, patient(20))
        assert answers(other)
        assert "died" in sync.heals[-1].cause
    for actor in (trainer, engines["e0"], other, *started):
        ray.kill(actor)
