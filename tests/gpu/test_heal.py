"""An engine on a GPU is killed and comes back: filled from what its holder keeps, the trainers not asked."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Engine, spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.test_end_to_end import Fleet, pid_of
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(bucket_bytes=4 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))
SETTLE_S = patient(120)


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_qwen3(tmp_path, "untied", 0)
    return str(tmp_path)


def test_killed_engines_come_back_at_the_committed_version(
    bundles: PlacementGroup, num_gpus: int, path: str
) -> None:
    """The first is filled by its own holder, the last, where there are several, by the first one's."""
    fleet = Fleet(bundles, path, num_gpus, list(range(num_gpus)))

    def respawn(name: str) -> ActorHandle[Any]:
        fleet.engines[name] = engine = spawn(Engine, bundles, int(name[1:]), path, name)
        return engine

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines(fleet.engines, respawn=respawn)
        sync.connect()
        for version in (1, 2):
            fleet.train(version)
            sync.update_weights(version)
        sync.settle(SETTLE_S)
        fleet.train(3)  # who asked the trainers would get this
        victims = sorted({"e0", f"e{num_gpus - 1}"})
        for name in victims:
            os.kill(pid_of(fleet.engines[name]), signal.SIGKILL)
        deadline = time.monotonic() + SETTLE_S
        while len(sync.heals) < len(victims) and time.monotonic() < deadline:
            sync.settle(SETTLE_S)
        heals = {heal.engine: heal for heal in sync.heals}
        assert heals.keys() == set(victims)
        for name, heal in heals.items():
            assert (heal.version, heal.verified) == (2, True)
            assert set(heal.ways.values()) == {"own" if name == "e0" else "mapped"}
        assert sync.serving().keys() == fleet.engines.keys()
        fleet.train(2)
        fleet.check()
        fleet.train(4)
        assert set(sync.update_weights(4).engines.values()) == {4}
        fleet.check()
    fleet.close()
