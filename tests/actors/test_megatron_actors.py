"""Megatron-Core's ranks as actors, and a real engine: its greedy tokens are those of the checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray

from tests.contract.megatron_ranks import Case
from tests.fleets.actors import spawn
from tests.fleets.megatron_trainer import MegatronTrainer
from tests.models import build_tiny_qwen3, greedy
from weightsync import EngineActor, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
]

PROMPTS = [[5, 17, 102], [64, 9], [33, 200, 7, 31]]
KIND = "vllm" if importlib.util.find_spec("vllm") else "torch"


@pytest.mark.parametrize(
    "case",
    [Case("dense", "qwen3", tp=2), Case("experts", "qwen3_moe", ep=2)],
    ids=["dense-tp-2", "experts-ep-2"],
)
def test_an_engine_answers_as_the_checkpoint_that_megatron_holds(
    case: Case, cluster: None, tmp_path: Path
) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    models = [build_tiny_qwen3(path, moe=case.ep > 1, seed=seed) for seed, path in enumerate(paths)]
    meeting, path = str(tmp_path / "meeting"), str(paths[0])
    trainers = [spawn(MegatronTrainer, rank, case, meeting, path) for rank in range(2)]
    engine = spawn(EngineActor, KIND, path, "e0", {}, "0")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, (path, model) in enumerate(zip(map(str, paths), models, strict=True), start=1):
            ray.get([trainer.load.remote(path) for trainer in trainers])
            assert sync.update_weights(version).engines == {"e0": version}
            rollout = ray.get(engine.generate.remote(PROMPTS, {"max_tokens": 16, "temperature": 0.0}))
            assert rollout.tokens == greedy(model, PROMPTS)
    ray.get(engine.close.remote())
    for trainer in trainers:
        ray.kill(trainer)
