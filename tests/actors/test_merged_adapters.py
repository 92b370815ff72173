"""Engines without adapter slots answer as PEFT does, by weights that have the adapter merged."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray

from tests.fleets.actors import spawn
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed"),
    pytest.mark.timeout(200),
]

PROMPT = [5, 9, 3, 7]
GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "saves"),
    [
        pytest.param(1, [], marks=pytest.mark.faults),
        pytest.param(2, [], marks=pytest.mark.faults),
        (2, ["lm_head", "model.norm"]),
    ],
)
def test_each_version_answers_as_peft_does(world: int, saves: list[str], tmp_path: Path) -> None:
    from tests.fleets.lora_trainer import TARGETS, LoraTrainer

    path = str(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "base", tied=not saves)
    ranks = range(world)
    settings = {"default": 4}, TARGETS, "default", saves
    adapters, *others = settings
    trainers = [spawn(LoraTrainer, path, adapters, rank, world, *others) for rank in ranks]
    reference = spawn(LoraTrainer, path, adapters, 0, 1, *others)
    engine = spawn(EngineActor, "torch", path, "e0")
    started = [trainer.start.remote(str(tmp_path / "meeting")) for trainer in trainers]
    ray.get([*started, reference.start.remote()], timeout=patient(60))
    config = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(60))
    with WeightSync(config) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        seen, moved = set(), []
        for version in range(1, 4):
            ray.get([each.train.remote("default", version) for each in (*trainers, reference)])
            ray.get([each.answers.remote("default", PROMPT, 1) for each in trainers])  # FSDP gathers them
            report = sync.update_weights(version)
            assert report.verified
            rollout = ray.get(engine.generate.remote([PROMPT], GREEDY), timeout=patient(60))
            assert rollout.tokens == [ray.get(reference.answers.remote("default", PROMPT, 8))]
            seen.add(tuple(rollout.tokens[0]))
            moved.append(report.nbytes)
        assert len(seen) == 3, "other weights, other answers"
        assert moved[0] > moved[1] == moved[2], "what nobody trains travels once"
    for actor in (*trainers, reference, engine):
        ray.kill(actor)
