"""Engines that sleep between updates, through the public door, over real Ray actors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.turns import GREEDY, PROMPTS, Sleeper, Teacher
from tests.models import build_tiny_qwen3
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, StateError, SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState

CONFIG = SyncConfig(bucket_bytes=16 << 10, timeout_s=patient(20))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_trainer_and_engine_take_turns(tmp_path: Path) -> None:
    build_tiny_qwen3(tmp_path, False, 1)
    trainer = spawn(Teacher, str(tmp_path), "s0")
    engine = spawn(Sleeper, "torch", str(tmp_path), "e0", {"enable_sleep_mode": True}, "s0")
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        with pytest.raises(StateError, match="connect"):
            sync.sleep()
        sync.connect()
        with pytest.raises(ConfigError, match=r"level: 3 is not valid; give 1.*or 2"):
            sync.sleep(level=3)
        with pytest.raises(ConfigError, match="did you mean 'e0'"):
            sync.sleep(["e1"])
        said = []
        for version, level in enumerate((2, 1, 2), start=1):
            sync.sleep(level=level)
            assert sync.engine_states() == {"e0": EngineState.ASLEEP}
            assert sync.serving() == {}
            assert ray.get(engine.live_nbytes.remote()) == 0
            with pytest.raises(StateError, match="e0 is asleep"):
                ray.get(engine.generate.remote(PROMPTS, GREEDY))
            ray.get(trainer.onload.remote())
            wanted = ray.get(trainer.train.remote(version))
            ray.get(trainer.offload.remote())
            assert ray.get(trainer.live_nbytes.remote()) == 0
            assert sync.update_weights(version).engines == {"e0": version}
            rollout = ray.get(engine.generate.remote(PROMPTS, GREEDY))
            assert (rollout.tokens, rollout.version) == (wanted, version)
            said.append(wanted)
        assert said[0] != said[1] != said[2]
        sync.sleep(["e0"], level=1)
        sync.wake()
        assert ray.get(engine.generate.remote(PROMPTS, GREEDY)).tokens == said[-1]
        sync.sleep()
        with pytest.raises(StateError, match=r"e0 sleeps without weights.*heal"):
            sync.wake(["e0"])
        sync.settle(patient(20))
        assert sync.heal("e0").version == 3
        assert ray.get(engine.generate.remote(PROMPTS, GREEDY)).tokens == said[-1]

        names: dict[str, Any] = {"sync": sync, "trainers": [trainer], "engine": engine, "ray": ray}
        names |= {"version": 4, "prompts": PROMPTS, "sampling": GREEDY}
        names = run_block("docs/guide.md", 2, names)
        assert names["rollout"].version == 4
        ray.get(trainer.onload.remote())
        assert names["rollout"].tokens == ray.get(trainer.says.remote()) != said[-1]
    for actor in (trainer, engine):
        ray.kill(actor)


@pytest.mark.faults
def test_one_that_dies_asleep_comes_back_with_the_committed_version() -> None:
    def respawn(name: str) -> Any:
        return spawn(Engine, 64, name, "x1")

    engines = {name: spawn(Engine, 64, name, slot) for name, slot in (("e0", "x0"), ("e1", "x1"))}
    with WeightSync(CONFIG) as sync:
        sync.register_trainers([spawn(Trainer, 64, "s0")])
        sync.register_engines(engines, respawn=respawn)
        sync.connect()
        sync.update_weights(1)
        sync.sleep()
        sync.settle(patient(20))
        os.kill(ray.get(engines["e1"].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        while not sync.heals:
            sync.settle(patient(20))
        assert sync.engine_states() == {"e0": EngineState.ASLEEP, "e1": EngineState.SERVING}
        assert sync.engine_versions() == {"e0": 0, "e1": 1}
        assert sync.update_weights(2).engines == {"e0": 2, "e1": 2}
