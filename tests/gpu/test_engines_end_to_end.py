"""The public door: fed by trainers, an engine says what it says when it starts from their checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu import test_sglang, test_vllm
from tests.gpu.fleet import SglangEngine, Trainer, VllmEngine, spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import assert_same
from tests.gpu.test_vllm import served
from tests.patience import patient
from weightsync import SyncConfig, SyncReport, WeightSync

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
needs_sglang = pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed")

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))


@dataclass(frozen=True)
class Case:
    """A model, the GPUs of the trainer's and of the engine's ranks, and for vLLM how its weights travel."""

    kind: str
    trainer_gpus: tuple[int, ...]
    engine_gpus: tuple[int, ...]
    mode: Literal["broadcast", "direct", "auto"] = "auto"


IN_VLLM = {
    "same_gpu": Case("tied", (0,), (0,), "broadcast"),
    "same_gpu_direct": Case("moe", (0,), (0,), "direct"),
    "other_gpu": Case("moe", (0,), (1,), "broadcast"),
    "same_two_gpus": Case("untied", (0, 1), (0, 1), "broadcast"),
    "same_two_gpus_direct": Case("untied", (0, 1), (0, 1), "direct"),
    "same_two_gpus_moe_direct": Case("moe", (0, 1), (0, 1), "direct"),
    "other_two_gpus": Case("untied", (0, 1), (2, 3), "broadcast"),
}
IN_SGLANG = {
    "same_gpu": Case("tied", (0,), (0,)),
    "other_gpu": Case("moe", (0,), (1,)),
    "same_two_gpus": Case("moe", (0, 1), (0, 1)),
    "other_two_gpus": Case("untied", (0, 1), (2, 3)),
}


@pytest.fixture
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


def spawn_trainers(
    gpus: tuple[int, ...], bundles: PlacementGroup, path: str, folder: Path
) -> list[ActorHandle[Any]]:
    """FSDP2 shards, a plain module where there is one."""
    arguments = len(gpus), "bfloat16", "device"
    trainers = [spawn(Trainer, bundles, gpu, path, rank, *arguments) for rank, gpu in enumerate(gpus)]
    ray.get([each.join.remote(str(folder / "meeting")) for each in trainers], timeout=patient(120))
    return trainers


def assert_live(engine: ActorHandle[Any], num_ranks: int) -> None:
    """Each rank has a GPU of its own, and its live parameters are written."""
    layouts = ray.get(engine.sync_layout.remote(), timeout=patient(200))
    assert len({layout.device for layout in layouts}) == len(layouts) == num_ranks
    for layout in layouts:
        assert layout.device.startswith("cuda:")
        assert layout.buffers, "it takes whole tensors, see the log of weightsync.engines"


def load(trainers: Sequence[ActorHandle[Any]], path: str) -> None:
    ray.get([trainer.load.remote(path) for trainer in trainers])


def update(sync: WeightSync, trainers: Sequence[ActorHandle[Any]], path: str, version: int) -> SyncReport:
    load(trainers, path)
    report = sync.update_weights(version)
    sys.stdout.write(f"{report} {dict(report.phases)} {dict(report.connect_phases)}\n")
    assert report.verified
    assert set(report.engines.values()) == {version}
    return report


def end(engine: ActorHandle[Any], trainers: Sequence[ActorHandle[Any]]) -> None:
    ray.get(engine.close.remote())
    for actor in (*trainers, engine):
        ray.kill(actor)


@needs_vllm
@pytest.mark.parametrize("case", IN_VLLM.values(), ids=list(IN_VLLM), indirect=True)
def test_vllm_answers_as_from_the_trainers_checkpoint(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    paths, num_ranks = save(tmp_path, case.kind), len(case.engine_gpus)
    expected = [test_vllm.from_disk(paths[0], num_ranks)]  # alone: what it compiles, the others find
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(test_vllm.from_disk, paths[1], num_ranks)
        path = str(tmp_path / "served")
        engine = spawn_engine(VllmEngine, bundles, case.engine_gpus, path, "e0", num_ranks)
        trainers = spawn_trainers(case.trainer_gpus, bundles, path, tmp_path)
        assert_live(engine, num_ranks)
        expected.append(later.result())
    assert expected[0] != expected[1]
    with WeightSync(replace(CONFIG, mode=case.mode)) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        writing = [
            sync.holders()[f"holder {number}"].__ray_call__.remote(lambda it: it.staging.writes)
            for number in dict(sync.plan.members.engines)["e0"]
        ]
        assert sum(ray.get(writing)) == num_ranks, "the engine copies, see the log of weightsync.engines"
        for version, (path, answers) in enumerate(zip(paths, expected, strict=True), start=1):
            report = update(sync, trainers, path, version)
            assert (report.num_buckets > 8) == (case.mode == "broadcast"), report.num_buckets
            assert_same(ray.get(engine.answers.remote()), answers)
    end(engine, trainers)


@needs_sglang
@pytest.mark.parametrize("case", IN_SGLANG.values(), ids=list(IN_SGLANG), indirect=True)
def test_sglang_answers_as_from_the_trainers_checkpoint(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """The same engine, fed by broadcasts first, and then as is best."""
    paths, num_ranks = save(tmp_path, case.kind), len(case.engine_gpus)
    # Alone on its GPUs: SGLang refuses ranks whose GPUs have unlike amounts of free memory.
    expected = test_sglang.from_disk(paths, num_ranks)
    assert expected[0] != expected[1]
    arguments = paths[0], "e0", num_ranks
    engine = spawn_engine(SglangEngine, bundles, case.engine_gpus, *arguments)  # starts meanwhile
    trainers = spawn_trainers(case.trainer_gpus, bundles, paths[0], tmp_path)
    assert_live(engine, num_ranks)
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
    end(engine, trainers)


@needs_vllm
@needs_sglang
def test_vllm_and_sglang_are_fed_by_one_plan(bundles: PlacementGroup, num_gpus: int, tmp_path: Path) -> None:
    if num_gpus < 2:
        pytest.skip("needs 2 GPUs")
    paths = save(tmp_path, "untied")
    trainers = spawn_trainers((0,), bundles, paths[0], tmp_path)
    engines = {"sglang": spawn(SglangEngine, bundles, 1, paths[0], "sglang", 1)}  # starts meanwhile
    of_vllm = test_vllm.from_disk(paths[1], 1)  # alone: what it compiles, the other finds
    engines["vllm"] = spawn(VllmEngine, bundles, 0, served(paths[1]), "vllm", 1)
    expected = test_sglang.from_disk(paths[1:], 1)[0]
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


@needs_vllm
def test_a_killed_vllm_comes_back_with_the_committed_weights(bundles: PlacementGroup, tmp_path: Path) -> None:
    """Dummy weights, then those that its holder keeps: the trainer, which has gone on, is not asked."""
    paths = save(tmp_path, "tied")
    engine = spawn(VllmEngine, bundles, 0, served(paths[0]), "e0", 1)
    trainers = spawn_trainers((0,), bundles, paths[0], tmp_path)
    ray.get(engine.info.remote(), timeout=patient(200))

    def respawn(name: str) -> ActorHandle[Any]:
        nonlocal engine
        engine = spawn(VllmEngine, bundles, 0, served(paths[0]), name, 1)
        return engine

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine}, respawn=respawn)
        sync.connect()
        load(trainers, paths[0])
        sync.update_weights(1)
        answers = ray.get(engine.answers.remote())
        sync.settle(patient(60))
        load(trainers, paths[1])
        os.kill(ray.get(engine.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        deadline = time.monotonic() + patient(200)
        while not sync.heals and time.monotonic() < deadline:
            sync.settle(patient(200))
        (heal,) = sync.heals
        sys.stdout.write(f"{heal}\n")
        assert (heal.version, set(heal.ways.values())) == (1, {"own"})
        assert_same(ray.get(engine.answers.remote()), answers)
        sync.update_weights(2)
        assert ray.get(engine.answers.remote()) != answers
    end(engine, trainers)
