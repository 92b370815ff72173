"""Actors that are registered again, in another order or under other names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.testing import Fault, FaultPlan

WIDTH = 64
CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=patient(2),
    connect_timeout_s=patient(60),
    heartbeat_s=patient(0.25),
    heal_attempts=0,
)


@pytest.fixture
def sync(cluster: None) -> Iterator[WeightSync]:
    """Two trainers and two engines, registered again the other way round."""
    trainers = [spawn(Trainer, WIDTH, f"again-t{rank}") for rank in range(2)]
    engines = {name: spawn(Engine, WIDTH, name, f"again-{name}") for name in ("e0", "e1")}
    with WeightSync(CONFIG) as made:
        made.register_trainers(trainers)
        made.register_engines(engines)
        made.connect()
        made.update_weights()
        made.register_trainers(trainers[::-1])
        made.register_engines({"e0": engines["e1"], "e1": engines["e0"]})
        made.connect()
        yield made
    for actor in (*trainers, *engines.values()):
        ray.kill(actor)


def test_trainers_in_another_order_publish_into_buffers_of_their_new_shares(sync: WeightSync) -> None:
    ray.get([trainer.train.remote(2) for trainer in sync.trainers()])
    assert sync.update_weights().engines == {"e0": 2, "e1": 2}
    trained, *held = ray.get(
        [each.weights.remote() for each in (sync.trainers()[0], *sync.engines().values())]
    )
    assert all(torch.equal(weights[name], each) for weights in held for name, each in trained.items())


def test_an_engine_that_ends_is_dead_by_its_new_name(sync: WeightSync) -> None:
    ray.kill(sync.engines()["e1"])
    assert until(lambda: sync.engine_states()["e1"] is EngineState.DEAD, patient(10))
    assert sync.engine_states()["e0"] is not EngineState.DEAD


def test_an_engine_that_fails_is_blamed_by_its_new_name(sync: WeightSync) -> None:
    ray.get(sync.engines()["e1"].fail_to_pause.remote(RuntimeError("no")))
    report = sync.update_weights()
    assert report.failures == {"e1": "engine e1 failed: RuntimeError: no (engine e1, version 2, pause)"}


def test_copies_are_looked_at_where_they_are_though_their_holders_have_other_numbers(cluster: None) -> None:
    trainers = [spawn(Trainer, WIDTH, f"fewer-t{rank}") for rank in range(2)]
    engines = {name: spawn(Engine, WIDTH, name, f"fewer-{name}") for name in ("e0", "e1")}
    with WeightSync(replace(CONFIG, heal_attempts=2, heal_backoff_s=0.01)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines(engines)
        sync.connect()
        sync.register_trainers(trainers[1:])
        sync.connect()
        sync.update_weights()
        sync.settle(patient(20))
        fails = Fault(process="engine e1", action="error", at="move", version=2)
        sync.inject(FaultPlan((fails, Fault(process="engine e1", action="corrupt", at="refill"))))
        assert sync.update_weights().engines == {"e0": 2, "e1": 0}
        sync.settle(patient(20))
        assert sync.engine_versions() == {"e0": 2, "e1": 2}
    for actor in (*trainers, *engines.values()):
        ray.kill(actor)
