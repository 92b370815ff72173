"""Hosts with different versions are refused by connect() and add_engine(), which name them."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Trainer
from tests.fleets.far_engine import Far
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import PlanError

CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), connect_timeout_s=patient(30))
SAYS = r"^engine far on host 192\.0\.2\.9: it has weightsync 9\.0\.1, and .* has .*: install one version"


def start(cls: type, *args: object) -> Any:
    return ray.remote(cls).options(num_cpus=0, max_restarts=0).remote(8, *args)


def test_two_versions_are_named_before_holders_start() -> None:
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([start(Trainer, "t")])
        sync.register_engines({"far": start(Far, "far", "b")})
        with pytest.raises(PlanError, match=SAYS):
            sync.connect()
        assert not sync.holders()


def test_a_late_engine_of_another_version_is_refused_and_the_others_go_on() -> None:
    with WeightSync(CONFIG) as sync:
        trainer, near = start(Trainer, "t"), start(Engine, "near", "a")
        sync.register_trainers([trainer])
        sync.register_engines({"near": near})
        sync.connect()
        with pytest.raises(PlanError, match=SAYS):
            sync.add_engine("far", start(Far, "far", "b"))
        assert [*sync.engines()] == ["near"]
        ray.get(trainer.train.remote(1))
        assert sync.update_weights(1).engines == {"near": 1}
