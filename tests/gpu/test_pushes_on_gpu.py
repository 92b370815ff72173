"""Weights on the trainers' hosts, pushed to holders on GPUs: through moves, crashes and healing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Engine, spawn
from tests.gpu.test_end_to_end import Fleet, pid_of
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import WeightSyncError
from weightsync.faults import Fault, FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(
    host_weights="push", bucket_bytes=4 << 20, timeout_s=patient(10), connect_timeout_s=patient(60)
)
SETTLE_S = patient(120)


def pushes(trainer: Any) -> bool:
    """Whether a trainer's process pushes. Also uses its GPU, which a broken context would refuse."""

    def look(_: object) -> bool:
        assert torch.ones(8, device="cuda").sum().item() == 8
        return any(thread.name == "weightsync-pushes" for thread in threading.enumerate())

    return ray.get(trainer.__ray_call__.remote(look), timeout=patient(60))


def move(trainer: Any) -> None:
    """Put a trainer's parameters into other memory."""

    def replace(actor: Any) -> None:
        actor.model.float().bfloat16()

    ray.get(trainer.__ray_call__.remote(replace), timeout=patient(60))


@pytest.fixture
def fleet(bundles: PlacementGroup, num_gpus: int, path: str) -> Iterator[Fleet]:
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)), source="host")
    yield fleet
    fleet.close()


def test_weights_of_trainers_hosts_are_pushed_and_follow_them(fleet: Fleet) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync)
        sync.connect()
        assert all(map(pushes, fleet.trainers))
        for version in range(1, 5):
            if version == 3:
                list(map(move, fleet.trainers[:1]))
            fleet.train(version)
            report = sync.update_weights(version)
            assert report.verified
            assert set(report.engines.values()) == {version}
            fleet.check()


@pytest.mark.parametrize("bucket", ["first", "middle"])
def test_trainers_outlive_holders_that_are_killed_in_a_push(fleet: Fleet, bucket: Any) -> None:
    with WeightSync(CONFIG) as sync:
        fleet.register(sync)
        sync.connect()
        before = [pid_of(trainer) for trainer in fleet.trainers]
        fleet.train(1)
        sync.update_weights(1)
        sync.inject(
            FaultPlan((Fault(process="holder 0", action="kill", at="move", bucket=bucket, version=2),))
        )
        with pytest.raises(WeightSyncError):
            sync.update_weights(2)
        fleet.train(3)
        assert set(sync.update_weights(3).engines.values()) == {3}
        fleet.check()
        assert [pid_of(trainer) for trainer in fleet.trainers] == before
        assert all(map(pushes, fleet.trainers))


def test_a_killed_engine_is_filled_with_what_was_pushed(fleet: Fleet, bundles: PlacementGroup) -> None:
    (name, victim), path = next(iter(fleet.engines.items())), fleet.path

    def respawn(name: str) -> ActorHandle[Any]:
        fleet.engines[name] = engine = spawn(Engine, bundles, int(name[1:]), path, name)
        return engine

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines(fleet.engines, respawn=respawn)
        sync.connect()
        fleet.train(1)
        sync.update_weights(1)
        sync.settle(SETTLE_S)
        fleet.train(2)  # who asked the trainers would get this
        os.kill(pid_of(victim), signal.SIGKILL)
        deadline = time.monotonic() + SETTLE_S
        while not sync.heals and time.monotonic() < deadline:
            sync.settle(SETTLE_S)
        (heal,) = sync.heals
        assert (heal.engine, heal.version, heal.verified) == (name, 1, True)
        fleet.train(1)
        fleet.check()
