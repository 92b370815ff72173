"""The public door with SGLang: fed by trainers, it says what it says when it starts from their checkpoint."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.gpu import test_vllm
from tests.gpu.fleet import SglangEngine, Trainer, VllmEngine, spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import assert_same
from tests.gpu.test_sglang import from_disk
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))


@dataclass(frozen=True)
class Case:
    """A model, and the GPUs of the trainer's and of the engine's ranks."""

    kind: str
    trainer_gpus: tuple[int, ...]
    engine_gpus: tuple[int, ...]


CASES = {
    "same_gpu": Case("tied", (0,), (0,)),
    "other_gpu": Case("moe", (0,), (1,)),
    "same_two_gpus": Case("moe", (0, 1), (0, 1)),
    "other_two_gpus": Case("untied", (0, 1), (2, 3)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, num_gpus: int) -> Case:
    needed = len({*request.param.trainer_gpus, *request.param.engine_gpus})
    if num_gpus < needed:
        pytest.skip(f"needs {needed} GPUs")
    return request.param


def save(folder: Path, kind: str) -> list[str]:
    paths = [str(folder / str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(Path(path), kind, seed)
    return paths


def spawn_trainers(gpus: tuple[int, ...], bundles: PlacementGroup, path: str, folder: Path) -> list[Any]:
    trainers = [
        spawn(Trainer, bundles, gpu, path, rank, len(gpus), "bfloat16", "device")
        for rank, gpu in enumerate(gpus)
    ]
    ray.get([trainer.join.remote(str(folder / "meeting")) for trainer in trainers], timeout=patient(120))
    return trainers


def update(sync: WeightSync, trainers: list[Any], path: str, version: int) -> Any:
    ray.get([trainer.load.remote(path) for trainer in trainers])
    report = sync.update_weights(version)
    sys.stdout.write(f"{report} {dict(report.phases)} {dict(report.connect_phases)}\n")
    assert report.verified
    assert set(report.engines.values()) == {version}
    return report


def test_sglang_answers_as_from_the_trainers_checkpoint(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """The same engine, fed by broadcasts first, and then as is best."""
    paths = save(tmp_path, case.kind)
    # Alone on its GPUs: SGLang refuses ranks whose GPUs have unlike amounts of free memory.
    expected = from_disk(paths, len(case.engine_gpus))
    assert expected[0] != expected[1]
    arguments = paths[0], "e0", len(case.engine_gpus)
    engine = spawn_engine(SglangEngine, bundles, case.engine_gpus, *arguments)  # starts meanwhile
    trainers = spawn_trainers(case.trainer_gpus, bundles, paths[0], tmp_path)
    layouts = ray.get(engine.sync_layout.remote(), timeout=patient(200))
    assert len({layout.device for layout in layouts}) == len(layouts) == len(case.engine_gpus)
    assert all(layout.buffers for layout in layouts), "see the log of weightsync.engines.sglang"
    for version, mode in enumerate(("broadcast", "auto"), start=1):
        with WeightSync(replace(CONFIG, mode=mode)) as sync:
            sync.register_trainers(trainers)
            sync.register_engines({"e0": engine})
            sync.connect()
            report = update(sync, trainers, paths[version - 1], version)
            assert (report.num_buckets > 8) == (mode == "broadcast"), report.num_buckets
            assert_same(ray.get(engine.answers.remote()), expected[version - 1])
            rollout = ray.get(engine.generate.remote([[1, 2, 3]], {"max_tokens": 4, "temperature": 0.0}))
            assert rollout.segments == [[(version, 4)]]
            assert (len(rollout.logprobs[0]), rollout.finish_reasons) == (4, ["length"])
            assert ray.get(engine.label.remote()) == str(version)
    ray.get(engine.close.remote())
    for actor in (*trainers, engine):
        ray.kill(actor)


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_vllm_and_sglang_are_fed_by_one_plan(bundles: PlacementGroup, num_gpus: int, tmp_path: Path) -> None:
    if num_gpus < 2:
        pytest.skip("needs 2 GPUs")
    paths = save(tmp_path, "untied")
    trainers = spawn_trainers((0,), bundles, paths[0], tmp_path)
    engines = {"sglang": spawn(SglangEngine, bundles, 1, paths[0], "sglang", 1)}  # starts meanwhile
    of_vllm = test_vllm.from_disk(paths[1], 1)  # alone: what it compiles, the other finds
    engines["vllm"] = spawn(VllmEngine, bundles, 0, test_vllm.served(paths[1]), "vllm", 1)
    expected = from_disk(paths[1:], 1)[0]
    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines(engines)
        sync.connect()
        for version, path in enumerate(paths, start=1):
            assert len(update(sync, trainers, path, version).engines) == 2
        assert_same(ray.get(engines["sglang"].answers.remote()), expected)
        assert_same(ray.get(engines["vllm"].answers.remote()), of_vllm)
    for actor in (*trainers, *engines.values()):
        ray.kill(actor)
