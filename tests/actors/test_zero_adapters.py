"""A LoRA adapter that ZeRO-3 trains, in real engines: tokens are those of PEFT's own forward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.fleets.actors import spawn
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import EngineActor, SyncConfig, SyncReport, WeightSync

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(300),
    *(
        pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed")
        for package in ("peft", "deepspeed")
    ),
]

CONFIG = SyncConfig(timeout_s=patient(30), connect_timeout_s=patient(120))
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_model_len": 64}
PROMPT = [5, 9, 3, 7]
GREEDY = {"max_tokens": 8, "temperature": 0.0}


def start(folder: Path, merge: str = "") -> tuple[str, list[Any]]:
    """Return the base's path, and two ranks that train an adapter of it."""
    from tests.fleets.zero_lora_trainer import ZeroLoraTrainer

    path = str(folder / "base")
    build_tiny_qwen3(folder / "base")
    trainers = [spawn(ZeroLoraTrainer, path, rank, 2, merge) for rank in range(2)]
    ray.get([each.start.remote(str(folder / "meeting")) for each in trainers], timeout=patient(60))
    return path, trainers


def check_versions(
    trainers: Sequence[Any], engine: Any, update: Callable[[], SyncReport], adapter: str
) -> None:
    """Train and update three times, and compare what is answered."""
    seen = set()
    for version in range(1, 4):
        ray.get([each.step.remote() for each in trainers], timeout=patient(60))
        report = update()
        assert report.verified
        assert report.version == version
        sampling = {**GREEDY, "adapter": adapter} if adapter else GREEDY
        rollout = ray.get(engine.generate.remote([PROMPT], sampling), timeout=patient(60))
        # Parameters stay gathered after a forward pass: the next update reads their partitions.
        answers = ray.get([each.answers.remote("default", PROMPT, 8) for each in trainers])
        assert [rollout.tokens[0]] * 2 == answers
        seen.add(tuple(rollout.tokens[0]))
    assert len(seen) == 3, "other weights, other answers"


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_each_version_in_slots_answers_as_peft_does(tmp_path: Path) -> None:
    path, trainers = start(tmp_path)
    engine = spawn(EngineActor, "vllm", path, "e0", OPTIONS)
    with WeightSync(CONFIG) as sync:
        sync.register_engines({"e0": engine})
        sync.register_checkpoint("base", [path])
        sync.connect()
        sync.update_weights(checkpoint="base")
        sync.register_adapter("math", trainers)
        check_versions(trainers, engine, lambda: sync.update_adapter("math"), "math")
    ray.wait([engine.close.remote()], timeout=patient(30))
    for actor in (engine, *trainers):
        ray.kill(actor)


def test_each_version_that_is_merged_answers_as_peft_does(tmp_path: Path) -> None:
    path, trainers = start(tmp_path, "default")
    engine = spawn(EngineActor, "torch", path, "e0")
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        check_versions(trainers, engine, sync.update_weights, "")
    for actor in (engine, *trainers):
        ray.kill(actor)
