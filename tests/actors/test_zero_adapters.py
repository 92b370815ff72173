"""A LoRA adapter that ZeRO-3 trains, on a real vLLM: tokens are those of PEFT's own forward pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray

from tests.actors.fleet import spawn
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    *(
        pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")
        for package in ("vllm", "peft", "deepspeed")
    ),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(120))
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 64}
PROMPT = [5, 9, 3, 7]


def test_each_version_answers_as_peft_does(tmp_path: Path) -> None:
    from tests.actors.zero_lora_trainer import ZeroLoraTrainer

    path = str(tmp_path / "base")
    build_tiny_qwen3(tmp_path / "base")
    engine = spawn(EngineActor, "vllm", path, "e0", OPTIONS)
    trainers = [spawn(ZeroLoraTrainer, path, rank, 2) for rank in range(2)]
    ray.get([each.start.remote(str(tmp_path / "meeting")) for each in trainers], timeout=patient(60))
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", trainers)
        seen = set()
        for version in range(1, 4):
            ray.get([each.step.remote() for each in trainers], timeout=patient(60))
            report = sync.update_adapter("math")
            assert report.verified
            assert (report.version, report.proofs) == (version, {"e0": "live weights"})
            sampling = {"max_tokens": 8, "temperature": 0.0, "adapter": "math"}
            rollout = ray.get(engine.generate.remote([PROMPT], sampling), timeout=patient(60))
            # Parameters stay gathered after a forward pass: the next update reads their partitions.
            answers = ray.get([each.answers.remote("default", PROMPT, 8) for each in trainers])
            assert [rollout.tokens[0]] * 2 == answers
            seen.add(tuple(rollout.tokens[0]))
        assert len(seen) == 3, "other weights, other answers"
    ray.wait([engine.close.remote()], timeout=patient(30))
    for actor in (engine, *trainers):
        ray.kill(actor)
