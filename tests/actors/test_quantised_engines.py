"""bf16 trainers and a real vLLM of int4 weights, which answers as one that starts from an int4 checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.actors.bf16_trainer import Bf16Trainer
from tests.actors.fleet import spawn
from tests.contract.test_vllm_quantized import Served
from tests.models import build_tiny_qwen3
from tests.quantised import INT4, save_int4
from tests.unit.project.test_docs import blocks
from weightsync import EngineActor, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

PROMPT = [5, 6, 7]


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Two checkpoints, each with an int4 one beside it, whose name ends in ``-int4``."""
    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        build_tiny_qwen3(path, seed=seed)
        save_int4(path, path.with_name(f"{path.name}-int4"))
    return paths


@pytest.fixture
def trainers(cluster: None, checkpoints: list[Path], tmp_path: Path) -> Iterator[list[Any]]:
    arguments = (2, str(tmp_path / "meeting"), str(checkpoints[0]))
    actors = [spawn(Bf16Trainer, rank, *arguments) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def from_disk(path: Path) -> list[int]:
    served = Served(path, "auto")
    said = served.says()
    served.close()
    return said


def test_an_int4_engine_and_a_bf16_engine_take_every_version_together(
    trainers: list[Any], checkpoints: list[Path]
) -> None:
    first, second = (from_disk(path.with_name(f"{path.name}-int4")) for path in checkpoints)
    assert first != second
    names: dict[str, Any] = {}
    exec(compile(blocks("docs/quantised.md")[0], "docs/quantised.md", "exec"), names)
    assert names["INT4"] == INT4
    int4 = names["start_engine"](str(checkpoints[0]), num_gpus=0)
    bf16 = spawn(EngineActor, "torch", str(checkpoints[0]), "bf16", {"dtype": "bfloat16"}, "1")
    with WeightSync(SyncConfig(bucket_bytes=64 << 10)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"int4": int4, "bf16": bf16})
        sync.connect()
        for version, number in enumerate((0, 1, 0), start=1):
            ray.get([trainer.load.remote(str(checkpoints[number])) for trainer in trainers])
            report = sync.update_weights(version)
            assert report.engines == {"int4": version, "bf16": version}
            rollout = ray.get(int4.generate.remote([PROMPT], {"max_tokens": 16, "temperature": 0.0}))
            assert rollout.tokens == [(first, second)[number]]
    for engine in (int4, bf16):
        ray.get(engine.close.remote())
        ray.kill(engine)
