"""A `respawn` that does not return is given up, blocks nobody, and keeps no process alive."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState

WIDTH = 64


@pytest.mark.faults  # it starts a driver of its own
def test_a_respawn_that_never_returns_leaves_its_engine_dead_and_lets_the_process_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fleets.stuck", ray.get_runtime_context().gcs_address],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        try:
            # Ray may speak of the killed worker before. The line says that close() has returned.
            found = json.loads(next(line for line in driver.stdout if line.startswith("{")))
            assert driver.wait(patient(30)) == 0
            log = driver.stderr.read()
        finally:
            driver.kill()
    assert found["states"] == {"e0": "SERVING", "e1": "DEAD", "e2": "SERVING"}
    assert found["engines"] == {"e0": 2, "e1": 0, "e2": 2}
    assert found["heals"] == ["e2"], "another engine is healed while the first start hangs"
    assert sorted(found["calls"]) == ["e0", "e1", "e2"], "it is not called again for the same engine"
    assert "[engine e1] is given up after 1 attempt: respawn: no answer within " in log


def test_an_actor_that_respawn_returns_too_late_is_killed() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    late: list[Any] = []

    def respawn(name: str) -> Any:
        begun.set()
        assert go_on.wait(patient(60))
        late.append(spawn(Engine, WIDTH, name, "late-1"))
        ended.set()
        return late[0]

    engines = {name: spawn(Engine, WIDTH, name, f"late-{name}") for name in ("e0", "e1")}
    with WeightSync(SyncConfig(bucket_bytes=64 << 10, respawn_timeout_s=0.5)) as sync:
        sync.register_trainers([trainer := spawn(Trainer, WIDTH, "late-e0")])
        sync.register_engines(engines, respawn=respawn)
        sync.connect()
        sync.update_weights(1)
        ray.kill(engines["e1"])
        assert begun.wait(patient(60))
        sync.settle(patient(60))
        assert sync.engine_states()["e1"] is EngineState.DEAD
        go_on.set()
        assert ended.wait(patient(60))
        assert until(lambda: _is_dead(late[0]), patient(60))
        assert sync.engine_states()["e1"] is EngineState.DEAD
        replacement = spawn(Engine, WIDTH, "e1", "late-e1")
        report = sync.add_engine("e1", replacement)
        assert report is not None
        assert sync.engine_versions() == {"e0": 1, "e1": 1}
    for actor in (trainer, engines["e0"], replacement):
        ray.kill(actor)


def _is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.sync_ping.remote(), timeout=patient(10))
    except RayActorError:
        return True
    return False
