"""Engines whose process was stopped when they were to pause, and goes on after the update."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.fleets.actors import spawn, until
from tests.fleets.faulty import pid
from tests.fleets.turns import GREEDY, PROMPTS, Teacher
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.driver.engine_state import EngineState

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
# No heartbeat comes in between: the engine is not found dead.
CONFIG = SyncConfig(
    bucket_bytes=64 << 10, timeout_s=patient(0.5), connect_timeout_s=patient(200), heartbeat_s=patient(200)
)
KINDS = ["torch", "vllm"]


@pytest.fixture
def actors() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for actor in started:
        ray.kill(actor)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_pauses_late_goes_on_by_itself(tmp_path: Path, actors: list[Any], kind: str) -> None:
    if kind == "vllm":
        pytest.importorskip("vllm")
    build_tiny_qwen3(tmp_path, False, 1)
    trainer = spawn(Teacher, str(tmp_path), "late")
    engines = {
        "e0": spawn(EngineActor, "torch", str(tmp_path), "e0", {}, "late-0"),
        "e1": spawn(EngineActor, kind, str(tmp_path), "e1", {}, "late-1"),
    }
    actors += [trainer, *engines.values()]
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        stopped = pid(engines["e1"])
        wanted = ray.get(trainer.train.remote(1))
        assert sync.update_weights(1).engines == {"e0": 1, "e1": 1}
        ray.get(trainer.train.remote(2))
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert sync.update_weights(2).engines == {"e0": 2, "e1": 1}
            assert set(sync.serving()) == {"e0"}
            assert sync.engine_states()["e1"] is EngineState.PAUSING
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert until(lambda: set(sync.serving(any_version=True)) == {"e0", "e1"}, patient(30))
        assert set(sync.serving()) == {"e0"}, "e1 serves an earlier version"
        rollout = ray.get(engines["e1"].generate.remote(PROMPTS, GREEDY), timeout=patient(30))
        assert (rollout.tokens, rollout.version) == (wanted, 1)
        assert sync.update_weights(3).engines == {"e0": 3, "e1": 3}
