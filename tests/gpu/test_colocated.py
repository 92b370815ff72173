"""A trainer and an engine take turns on one GPU: a hundred rounds, in which memory comes and goes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import SglangEngine, Trainer, VllmEngine, spawn
from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.test_vllm import served
from tests.patience import patient
from weightsync import StateError, SyncConfig, WeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(420),
]

CONFIG = SyncConfig(bucket_bytes=1 << 20, timeout_s=patient(60), connect_timeout_s=patient(300))
NUM_ROUNDS = 100
SETTLED = 3
"""From this round on memory in use does not change."""
SLACK_NBYTES = 8 << 20
"""Of the whole GPU's, and less than a leak of one bucket in each tenth round."""
GREEDY = {"max_tokens": 16, "temperature": 0.0}
PROMPTS = [
    torch.randint(3, 5000, (5 + 9 * i,), generator=torch.Generator().manual_seed(i)).tolist()
    for i in range(3)
]


@dataclass(frozen=True)
class Case:
    """An engine that is started to sleep, and what it gives back besides its weights."""

    cls: type
    level: int
    caches_nbytes: int
    options: dict[str, object] = field(default_factory=dict)


CASES = {
    "vllm_level_1": Case(VllmEngine, 1, 256 << 20, {"enable_sleep_mode": True}),
    "vllm_level_2": Case(VllmEngine, 2, 256 << 20, {"enable_sleep_mode": True}),
    "sglang_level_1": Case(
        SglangEngine, 1, 32 << 20, {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    ),
    "sglang_level_2": Case(SglangEngine, 2, 32 << 20, {"enable_memory_saver": True}),
}
NEEDS = {VllmEngine: ("vllm",), SglangEngine: ("sglang", "torch_memory_saver")}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    for package in NEEDS[request.param.cls]:
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    return request.param


class UpdateLock:
    """One GPU: a trainer that knows two checkpoints, an engine, and what was measured."""

    def __init__(self, case: Case, bundles: PlacementGroup, folder: Path, source: str) -> None:
        self.case, self.offloads = case, source == "turns"
        paths = [str(folder / str(seed)) for seed in range(2)]
        for seed, path in enumerate(paths):
            save_qwen3(Path(path), "tied", seed)
        self.trainer = spawn(Trainer, bundles, 0, paths[0], 0, 1, "bfloat16", source)
        ray.get(self.trainer.join.remote(""), timeout=patient(120))
        ray.get(self.trainer.remember.remote(paths), timeout=patient(120))
        self.engine = spawn(case.cls, bundles, 0, served(paths[0]), "e0", 1, **case.options)
        self.used: list[tuple[int, int]] = []
        self.first: dict[int, list[list[int]]] = {}

    def gap(self, prompt: list[int], row: list[int]) -> float:
        if not self.offloads:
            return ray.get(self.trainer.gap.remote(prompt, row))
        ray.get(self.trainer.onload.remote())
        gap = ray.get(self.trainer.gap.remote(prompt, row))
        ray.get(self.trainer.offload.remote())
        return gap

    def connect(self, sync: WeightSync) -> None:
        sync.register_trainers([self.trainer])
        sync.register_engines({"e0": self.engine})
        sync.connect()
        (layout,) = ray.get(self.engine.sync_layout.remote(), timeout=patient(200))
        assert layout.buffers, "it reloads here, see the log of weightsync.engines"

    def device_nbytes(self) -> int:
        return ray.get(self.trainer.device_nbytes.remote())

    def check(self, version: int, number: int) -> None:
        """The greedy tokens of checkpoint `number`: transformers' at first, and the same ever after."""
        rollouts = [self.ask(prompt) for prompt in PROMPTS]
        assert [rollout.version for rollout in rollouts] == [version] * len(PROMPTS)
        tokens = [rollout.tokens[0] for rollout in rollouts]
        if number not in self.first:
            self.first[number] = tokens
            for prompt, row in zip(PROMPTS, tokens, strict=True):
                gap = self.gap(prompt, row)
                assert gap < 0.5, (
                    f"not the tokens of checkpoint {number}: {gap}"
                )  # another's lie about 3 below
        assert tokens == self.first[number], f"version {version}"

    def ask(self, prompt: list[int]) -> Any:
        return ray.get(self.engine.generate.remote([prompt], GREEDY))

    def assert_flat(self, weights_nbytes: int) -> None:
        """Memory in use is the same from round to round, and really lower asleep than awake."""
        awake, asleep = zip(*self.used, strict=True)
        sys.stdout.write(f"MiB awake {[n >> 20 for n in awake]}\nMiB asleep {[n >> 20 for n in asleep]}\n")
        for used in (awake, asleep):
            assert max(used[SETTLED:]) - min(used[SETTLED:]) <= SLACK_NBYTES
        least = 0.9 * (weights_nbytes + self.case.caches_nbytes)
        assert all(a - b >= least for a, b in self.used[SETTLED:]), (least, self.used[-1])

    def close(self) -> None:
        ray.get(self.engine.close.remote())
        for actor in (self.trainer, self.engine):
            ray.kill(actor)


def test_a_hundred_turns_with_the_trainers_memory_read_in_place(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    turns = UpdateLock(case, bundles, tmp_path, "device")
    with WeightSync(CONFIG) as sync:
        turns.connect(sync)
        sync.sleep(level=case.level)  # as it came, with dummy weights
        for version in range(1, NUM_ROUNDS + 1):
            number = version % 2
            ray.get(turns.trainer.become.remote(number))
            report = sync.update_weights(version)
            if version <= SETTLED or version == NUM_ROUNDS:
                sys.stdout.write(f"{report} {dict(report.phases)} {dict(report.routes)}\n")
            assert (report.verified, report.engines) == (True, {"e0": version})
            turns.check(version, number)
            awake = turns.device_nbytes()
            sync.sleep(level=case.level)
            turns.used.append((awake, turns.device_nbytes()))
            if version == 1:
                with pytest.raises(StateError, match="e0 is asleep"):
                    turns.ask(PROMPTS[0])
        turns.assert_flat(report.nbytes)
        peaks = {phase: max(by_gpu.values()) for phase, by_gpu in report.peak_memory.items()}
        sys.stdout.write(f"peaks {peaks}\n")
        assert peaks["commit"] - peaks["move"] >= 0.9 * case.caches_nbytes, (
            "caches woke before weights were written"
        )
        assert turns.first[0] != turns.first[1]
        if case.level == 1:
            sync.wake()
            turns.check(NUM_ROUNDS, number)
        else:
            with pytest.raises(StateError, match="without weights"):
                sync.wake()
    turns.close()


NUM_OFFLOADS = 30


@pytest.mark.parametrize(
    "case", [CASES["vllm_level_2"], CASES["sglang_level_2"]], ids=["vllm", "sglang"], indirect=True
)
def test_trainer_and_engine_have_the_gpu_by_turns(
    case: Case, bundles: PlacementGroup, tmp_path: Path
) -> None:
    """Weights of both never lie there at the same time: the trainer's go through the pinned send buffer."""
    turns = UpdateLock(case, bundles, tmp_path, "turns")
    trained = []
    with WeightSync(CONFIG) as sync:
        turns.connect(sync)
        for version in range(1, NUM_OFFLOADS + 1):
            sync.sleep(level=case.level)
            ray.get(turns.trainer.onload.remote())
            ray.get(turns.trainer.become.remote(version % 2))
            trained.append(turns.device_nbytes())
            ray.get(turns.trainer.offload.remote())
            empty = turns.device_nbytes()
            report = sync.update_weights(version)
            assert (report.verified, report.engines) == (True, {"e0": version})
            turns.check(version, version % 2)
            turns.used.append((turns.device_nbytes(), empty))
        turns.assert_flat(report.nbytes)
        sys.stdout.write(f"MiB trained {[n >> 20 for n in trained]}\n{report} {dict(report.phases)}\n")
        assert trained[-1] - empty >= 0.8 * report.nbytes, "the trainer's memory was not given back"
        assert max(trained[SETTLED:]) - min(trained[SETTLED:]) <= SLACK_NBYTES
        assert report.peak_memory["move"].keys() == report.peak_memory["commit"].keys() != set()
    turns.close()
