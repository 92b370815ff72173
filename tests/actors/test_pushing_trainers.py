"""Trainers that push weights from host memory, over real Ray actors, and what a crash in a push does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Pushing, forget, spawn
from tests.patience import patient
from weightsync import PeerLostError, SyncConfig, WeightSync
from weightsync.errors import DeadlineError, WeightSyncError
from weightsync.faults import Fault, FaultPlan

WIDTH = 64


@pytest.fixture(scope="module")
def engines(cluster: None) -> list[Any]:
    return [spawn(Engine, WIDTH, f"e{i}", f"x{i}") for i in range(2)]


@pytest.fixture
def sync(engines: list[Any]) -> Iterator[WeightSync]:
    config = SyncConfig(
        host_weights="push",
        bucket_bytes=8192,
        keep_versions=1,
        timeout_s=patient(5),
        connect_timeout_s=patient(30),
    )
    forget(engines)
    with WeightSync(config) as sync:
        sync.register_trainers([spawn(Pushing, WIDTH, f"s{i}") for i in range(2)])
        sync.register_engines({f"e{i}": engine for i, engine in enumerate(engines)})
        sync.connect()
        assert [way for way, _ in told(sync)] == ["PushTicket"] * 2
        yield sync
        for trainer in sync.trainers():
            ray.kill(trainer)


def told(sync: WeightSync) -> list[tuple[str, int]]:
    return ray.get([trainer.told.remote() for trainer in sync.trainers()], timeout=patient(30))


def update(sync: WeightSync, version: int) -> None:
    """Train, update, and compare each engine's weights with the trainers'."""
    ray.get([trainer.train.remote(version) for trainer in sync.trainers()])
    report = sync.update_weights(version)
    assert report.verified
    assert report.engines == {"e0": version, "e1": version}
    wanted = ray.get(sync.trainers()[0].weights.remote())
    for engine in sync.engines().values():
        found = ray.get(engine.weights.remote())
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_versions_are_pushed(sync: WeightSync) -> None:
    for version in (1, 2, 3):
        update(sync, version)


@pytest.mark.faults
def test_a_trainer_that_is_killed_while_it_is_asked_fails_the_update_at_once(sync: WeightSync) -> None:
    update(sync, 1)
    sync.inject(FaultPlan((Fault(process="trainer 1", action="kill", at="publish", version=2),)))
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="trainer 1"):
        sync.update_weights(2)
    assert time.monotonic() - begun < patient(5)


@pytest.mark.faults
def test_a_trainer_that_stops_is_named_and_pushes_again_once_it_goes_on(sync: WeightSync) -> None:
    update(sync, 1)
    _, stopped = told(sync)[1]
    sync.inject(FaultPlan((Fault(process="trainer 1", action="hang", at="publish", version=2),)))
    with pytest.raises(DeadlineError, match="trainer 1"):
        sync.update_weights(2)
    os.kill(stopped, signal.SIGCONT)
    update(sync, 3)


@pytest.mark.faults
@pytest.mark.parametrize("bucket", ["first", "middle", "last"])
def test_a_holder_that_is_killed_in_a_push_does_not_harm_its_trainer(sync: WeightSync, bucket: Any) -> None:
    update(sync, 1)
    before = told(sync)
    sync.inject(FaultPlan((Fault(process="holder 0", action="kill", at="move", bucket=bucket, version=2),)))
    with pytest.raises(WeightSyncError):
        sync.update_weights(2)
    update(sync, 3)
    assert told(sync) == before
