"""DeepSpeed's and Megatron-Core's ranks on GPUs, read in place by vLLM: it answers as from their checkpoint.

A rank has a GPU of its own, so with one GPU there is one rank.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from tests.contract.megatron_ranks import Case
from tests.gpu.fleet import VllmEngine, spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import assert_same
from tests.gpu.test_vllm import from_disk
from tests.gpu.trainers import DeepSpeedTrainer, MegatronTrainer
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(mode="direct", timeout_s=patient(30), connect_timeout_s=patient(60))
SIZES = [(1, 1), (2, 1), (2, 2)]
"""Trainer ranks, and ranks of the engine."""


@pytest.fixture(params=SIZES, ids=[f"{trainers}-to-{ranks}" for trainers, ranks in SIZES])
def sizes(request: pytest.FixtureRequest, num_gpus: int) -> tuple[int, int]:
    if num_gpus < max(request.param):
        pytest.skip(f"needs {max(request.param)} GPUs")
    return request.param


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """Actors that are killed after the test."""
    actors: list[Any] = []
    yield actors
    for actor in actors:
        ray.kill(actor)


def start(
    cls: type, bundles: PlacementGroup, path: Path, num_ranks: int, folder: Path, *more: object
) -> list[Any]:
    meeting = str(folder / "meeting")
    return [
        spawn(cls, bundles, rank, str(path), rank, num_ranks, meeting, *more) for rank in range(num_ranks)
    ]


def start_engine(bundles: PlacementGroup, num_ranks: int, folder: Path) -> Any:
    """Start vLLM with the path that `from_disk` gave another one."""
    arguments = str(folder / "served"), "e0", num_ranks
    engine = spawn_engine(VllmEngine, bundles, range(num_ranks), *arguments)
    ray.get(engine.info.remote(), timeout=patient(200))
    return engine


def connect(sync: WeightSync, trainers: list[Any], engine: Any) -> None:
    sync.register_trainers(trainers)
    sync.register_engines({"e0": engine})
    sync.connect()


def test_deepspeed_trains_and_vllm_answers_as_its_checkpoint(
    sizes: tuple[int, int], bundles: PlacementGroup, tmp_path: Path, ended: list[Any]
) -> None:
    pytest.importorskip("deepspeed")
    num_trainers, num_ranks = sizes
    save_qwen3(tmp_path / "first", "tied", 0)
    trainers = start(DeepSpeedTrainer, bundles, tmp_path / "first", num_trainers, tmp_path)
    ended += trainers
    ray.get([trainer.train.remote(1) for trainer in trainers], timeout=patient(120))
    ray.get([trainer.save.remote(str(tmp_path / "saved")) for trainer in trainers], timeout=patient(60))
    answers = from_disk(str(tmp_path / "saved"), num_ranks)  # alone: what it compiles, the engine finds
    engine = start_engine(bundles, num_ranks, tmp_path)
    ended.append(engine)
    with WeightSync(CONFIG) as sync:
        connect(sync, trainers, engine)
        report = sync.update_weights(1)
        sys.stdout.write(f"{report} {dict(report.phases)}\n")
        assert (report.verified, report.num_buckets) == (True, 0)
        assert_same(ray.get(engine.answers.remote()), answers)
        for version in (2, 3):
            ray.get([trainer.train.remote(version) for trainer in trainers])
            assert sync.update_weights(version).nbytes < report.nbytes  # norms are frozen
            later = ray.get(engine.answers.remote())
            assert later != answers
            answers = later
    ray.get(engine.close.remote())


@pytest.mark.parametrize("kind", ["dense", "experts", "cut experts"])
def test_vllm_answers_as_the_checkpoint_that_megatron_holds(
    kind: str, sizes: tuple[int, int], bundles: PlacementGroup, tmp_path: Path, ended: list[Any]
) -> None:
    pytest.importorskip("megatron.core")
    num_trainers, num_ranks = sizes
    case = {
        "dense": Case(kind, "qwen3", tp=num_trainers),
        "experts": Case(kind, "qwen3_moe", ep=num_trainers),
        "cut experts": Case(kind, "qwen3_moe", tp=num_trainers, etp=num_trainers),
    }[kind]
    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(path, "untied" if kind == "dense" else "moe", seed)
    trainers = start(MegatronTrainer, bundles, paths[0], num_trainers, tmp_path, case)
    ended += trainers
    answers = from_disk(str(paths[1]), num_ranks)
    engine = start_engine(bundles, num_ranks, tmp_path)
    ended.append(engine)
    with WeightSync(CONFIG) as sync:
        connect(sync, trainers, engine)
        for version, path in enumerate(paths, start=1):
            ray.get([trainer.load.remote(str(path)) for trainer in trainers])
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {dict(report.phases)}\n")
            assert (report.verified, report.num_buckets) == (True, 0)
        assert_same(ray.get(engine.answers.remote()), answers)
    ray.get(engine.close.remote())
