"""The public door with vLLM: fed by trainers, it says what it says when it starts from their checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import Trainer, VllmEngine, spawn, spawn_engine
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import assert_same
from tests.gpu.test_vllm import from_disk, served
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(30), connect_timeout_s=patient(60))


@dataclass(frozen=True)
class Case:
    """A model, the GPUs of the trainer's and of the engine's ranks, and how its weights travel."""

    kind: str
    trainer_gpus: tuple[int, ...]
    engine_gpus: tuple[int, ...]
    mode: Literal["broadcast", "direct"]


CASES = {
    "same_gpu": Case("tied", (0,), (0,), "broadcast"),
    "same_gpu_direct": Case("moe", (0,), (0,), "direct"),
    "other_gpu": Case("moe", (0,), (1,), "broadcast"),
    "same_two_gpus": Case("untied", (0, 1), (0, 1), "broadcast"),
    "same_two_gpus_direct": Case("untied", (0, 1), (0, 1), "direct"),
    "same_two_gpus_moe_direct": Case("moe", (0, 1), (0, 1), "direct"),
    "other_two_gpus": Case("untied", (0, 1), (2, 3), "broadcast"),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest, num_gpus: int) -> Case:
    needed = len({*request.param.trainer_gpus, *request.param.engine_gpus})
    if num_gpus < needed:
        pytest.skip(f"needs {needed} GPUs")
    return request.param


class Fleet:
    """FSDP2 shards, a plain module where there is one, and one vLLM."""

    def __init__(self, case: Case, bundles: PlacementGroup, path: str, folder: Path) -> None:
        num_trainers = len(case.trainer_gpus)
        self.num_ranks = len(case.engine_gpus)
        self.trainers = [
            spawn(Trainer, bundles, gpu, path, rank, num_trainers, "bfloat16", "device")
            for rank, gpu in enumerate(case.trainer_gpus)
        ]
        joined = [trainer.join.remote(str(folder / "meeting")) for trainer in self.trainers]
        arguments = path, "e0", self.num_ranks
        self.engine = spawn_engine(VllmEngine, bundles, case.engine_gpus, *arguments)
        ray.get([*joined, self.engine.info.remote()], timeout=patient(200))

    def connect(self, sync: WeightSync) -> None:
        sync.register_trainers(self.trainers)
        sync.register_engines({"e0": self.engine})
        sync.connect()

    def assert_live(self, sync: WeightSync) -> None:
        """Each rank has a GPU of its own, whose holder writes into the parameters that vLLM uses."""
        layouts = ray.get(self.engine.sync_layout.remote())
        assert len({layout.device for layout in layouts}) == len(layouts) == self.num_ranks
        for layout in layouts:
            assert layout.device.startswith("cuda:")
            assert layout.buffers, "vLLM reloads here, see the log of weightsync.engines.vllm"
        writing = [
            sync.holders()[f"holder {number}"].__ray_call__.remote(lambda it: it.staging.writes)
            for number in dict(sync.plan.members.engines)["e0"]
        ]
        assert sum(ray.get(writing)) == self.num_ranks, "the engine copies, see the log of weightsync.engines"

    def load(self, path: str) -> None:
        ray.get([trainer.load.remote(path) for trainer in self.trainers])

    def close(self) -> None:
        ray.get(self.engine.close.remote())
        for actor in (*self.trainers, self.engine):
            ray.kill(actor)


def test_vllm_answers_as_from_the_trainers_checkpoint(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    paths = [str(tmp_path / str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(Path(path), case.kind, seed)
    num_ranks = len(case.engine_gpus)
    expected = [from_disk(paths[0], num_ranks)]  # alone: what it compiles, the others find
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(from_disk, paths[1], num_ranks)
        fleet = Fleet(case, bundles, str(tmp_path / "served"), tmp_path)
        expected.append(later.result())
    assert expected[0] != expected[1]
    with WeightSync(replace(CONFIG, mode=case.mode)) as sync:
        fleet.connect(sync)
        fleet.assert_live(sync)
        for version, (path, answers) in enumerate(zip(paths, expected, strict=True), start=1):
            fleet.load(path)
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {dict(report.phases)} {dict(report.connect_phases)}\n")
            assert report.verified
            assert report.engines == {"e0": version}
            assert (report.num_buckets > 8) == (case.mode == "broadcast"), report.num_buckets
            assert_same(ray.get(fleet.engine.answers.remote()), answers)
    fleet.close()


def test_a_killed_vllm_comes_back_with_the_committed_weights(bundles: PlacementGroup, tmp_path: Path) -> None:
    """Dummy weights, then those that its holder keeps: the trainer, which has gone on, is not asked."""
    paths = [str(tmp_path / str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(Path(path), "tied", seed)
    fleet = Fleet(CASES["same_gpu"], bundles, served(paths[0]), tmp_path)

    def respawn(name: str) -> ActorHandle[Any]:
        fleet.engine = spawn(VllmEngine, bundles, 0, served(paths[0]), name, 1)
        return fleet.engine

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(fleet.trainers)
        sync.register_engines({"e0": fleet.engine}, respawn=respawn)
        sync.connect()
        fleet.load(paths[0])
        sync.update_weights(1)
        answers = ray.get(fleet.engine.answers.remote())
        sync.settle(patient(60))
        fleet.load(paths[1])
        os.kill(ray.get(fleet.engine.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        deadline = time.monotonic() + patient(200)
        while not sync.heals and time.monotonic() < deadline:
            sync.settle(patient(200))
        (heal,) = sync.heals
        sys.stdout.write(f"{heal}\n")
        assert (heal.version, set(heal.ways.values())) == (1, {"own"})
        assert_same(ray.get(fleet.engine.answers.remote()), answers)
        sync.update_weights(2)
        assert ray.get(fleet.engine.answers.remote()) != answers
    fleet.close()
