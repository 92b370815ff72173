"""vLLM moves experts between two GPUs: updates write each copy where it is, and experts move on request."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tests.gpu.fleet import VllmEngine, spawn_engine
from tests.gpu.quantised_fleet import CONFIG, end, join, save_versions
from tests.gpu.same_answers import Answers
from tests.gpu.test_vllm import from_disk, served
from tests.patience import patient
from weightsync import WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.errors import WeightSyncError
from weightsync.faults import Fault, FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(420),
]

NUM_RANKS = 2
# Eight experts in ten slots. Each answer has more steps than vLLM waits before it moves experts.
BALANCED: dict[str, Any] = {
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "window_size": 8, "step_interval": 16},
}
STILL = BALANCED | {"eplb_config": BALANCED["eplb_config"] | {"step_interval": 1 << 20}}


def start(bundles: PlacementGroup, path: str, options: dict[str, Any]) -> ActorHandle[Any]:
    return spawn_engine(VllmEngine, bundles, range(NUM_RANKS), path, "e0", NUM_RANKS, **options)


def distance(found: Answers, wanted: Answers) -> float:
    """How far the likeliest tokens' log-probabilities of prompts differ on average.

    Ranks add up their experts' outputs, so that other places of experts round otherwise, and a router may
    choose another of two experts that are as good.
    """
    rows = [
        (mine, theirs)
        for one, other in zip(found, wanted, strict=True)
        for mine, theirs in zip(one["prompt_logprobs"], other["prompt_logprobs"], strict=True)
    ]
    return fmean(abs(max(p for _, p in mine) - max(p for _, p in theirs)) for mine, theirs in rows)


def test_updates_follow_experts_and_move_them(bundles: PlacementGroup, num_gpus: int, tmp_path: Path) -> None:
    if num_gpus < NUM_RANKS:
        pytest.skip(f"needs {NUM_RANKS} GPUs")
    paths, _ = save_versions(tmp_path, "moe")
    quick = {
        "enable_expert_parallel": True,
        "enforce_eager": True,
    }  # it rounds otherwise, as moved experts do
    answers = [from_disk(str(path), NUM_RANKS, **quick) for path in paths]
    apart = distance(*answers)
    engine = start(bundles, served(str(paths[0])), BALANCED)
    trainers = join(bundles, paths[0], tmp_path, 1, None)
    ray.get(engine.info.remote(), timeout=patient(200))

    def wrong(number: int) -> list[str]:
        return ray.get(engine.wrong_slots.remote(str(paths[number])))

    def says(number: int) -> float:
        return distance(ray.get(engine.answers.remote()), answers[number])

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        for version, number in enumerate((0, 1, 0), start=1):
            before = sync.experts("e0")
            ray.get([trainer.load.remote(str(paths[number])) for trainer in trainers])
            report = sync.update_weights(version)
            sys.stdout.write(f"{report} {report.routes} {report.proofs} {dict(report.phases)}\n")
            assert report.engines == {"e0": version}
            assert report.proofs == {"e0": "live weights"}
            assert report.routes["e0"].startswith("direct")
            assert wrong(number) == []
            assert says(number) < apart / 4  # vLLM moves experts meanwhile
            assert sync.experts("e0") != before
            assert wrong(number) == []
        wanted = [row[::-1] for row in sync.experts("e0")]
        report = sync.move_experts({"e0": wanted})
        sys.stdout.write(f"{report} {dict(report.phases)}\n")
        assert sync.experts("e0") == wanted
        assert wrong(0) == []
        assert says(0) < apart / 4
        ray.get([trainer.load.remote(str(paths[1])) for trainer in trainers])
        sync.update_weights(4)
        assert wrong(1) == []
        assert says(1) < apart / 4
    end(engine, *trainers)


def test_a_rank_that_is_killed_while_experts_move(
    bundles: PlacementGroup, num_gpus: int, tmp_path: Path
) -> None:
    if num_gpus < NUM_RANKS:
        pytest.skip(f"needs {NUM_RANKS} GPUs")
    paths, _ = save_versions(tmp_path, "moe")
    engines = [start(bundles, served(str(paths[0])), STILL)]
    trainers = join(bundles, paths[0], tmp_path, 1, None)
    ray.get(engines[0].info.remote(), timeout=patient(200))

    def respawn(name: str) -> ActorHandle[Any]:
        engines.append(start(bundles, served(str(paths[0])), STILL))
        ray.get(engines[-1].info.remote(), timeout=patient(200))
        return engines[-1]

    with WeightSync(CONFIG) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engines[0]}, respawn=respawn)
        sync.connect()
        ray.get(trainers[0].load.remote(str(paths[0])))
        sync.update_weights(1)
        sync.settle(patient(60))
        wanted = [row[::-1] for row in sync.experts("e0")]
        sync.inject(FaultPlan((Fault(process="engine e0", action="kill", at="move", rank=1),)))
        with pytest.raises(WeightSyncError, match="rank 1"):
            sync.move_experts({"e0": wanted})
        sync.settle(patient(200))
        assert len(engines) == 2
        assert sync.engine_versions() == {"e0": 1}, "the copies of before the move are of where vLLM starts"
        assert ray.get(engines[1].wrong_slots.remote(str(paths[0]))) == []
        report = sync.update_weights(2)
        assert report.states == {"e0": EngineState.SERVING.value}
        assert ray.get(engines[1].wrong_slots.remote(str(paths[0]))) == []
        sync.move_experts({"e0": wanted})
        assert ray.get(engines[1].wrong_slots.remote(str(paths[0]))) == []
    end(engines[1], *trainers)
