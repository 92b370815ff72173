"""vLLM's own load balancer moves experts between two processes, and updates follow it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.actor import ActorHandle
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.fleets.actors import spawn
from tests.fleets.balanced_vllm import BalancedActor
from tests.fleets.bf16_trainer import Bf16Trainer
from tests.gpu.qwen3_models import save_checkpoint
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, SyncConfig, WeightSync
from weightsync.actors.engine import EngineActor
from weightsync.errors import RankLostError, VerifyError
from weightsync.faults import Fault, FaultPlan
from weightsync.memory.tensors import named_tensors

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(400),
]

LOADS = [1, 2, 30, 4, 5, 60, 7, 8], [60, 1, 1, 1, 30, 1, 1, 1]


def checkpoint(path: Path, seed: int) -> str:
    config = Qwen3MoeConfig(
        vocab_size=251,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_checkpoint(path, config, named_tensors(model)[0])
    return str(path)


class Fleet:
    """A trainer, an engine whose experts move, and one that has them all in one process."""

    def __init__(self, folder: Path) -> None:
        self.paths = [checkpoint(folder / str(seed), seed) for seed in range(2)]
        self.trainer = spawn(Bf16Trainer, 0, 1, str(folder / "meeting"), self.paths[0])
        self.balanced: list[ActorHandle[Any]] = []
        self.torch = spawn(EngineActor, "torch", self.paths[0], "e1", {"dtype": "bfloat16"}, "1")
        self.sync = WeightSync(SyncConfig(bucket_bytes=64 << 10, timeout_s=patient(20)))
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines({"e0": self.start("e0"), "e1": self.torch}, respawn=self.start)
        self.sync.connect()

    def start(self, name: str) -> ActorHandle[Any]:
        self.balanced.append(spawn(BalancedActor, self.paths[0], name, "0"))
        ray.get(self.balanced[-1].info.remote(), timeout=patient(100))
        return self.balanced[-1]

    def ask(self, method: str, *args: object) -> list[Any]:
        """Call a method of each rank's process."""
        return ray.get(self.balanced[-1].ask.remote(method, *args))

    def train(self, number: int) -> None:
        ray.get(self.trainer.load.remote(self.paths[number]))

    def check(self, number: int) -> None:
        """Compare each slot with the expert that vLLM's router sends there, bit for bit."""
        assert self.ask("wrong", self.paths[number]) == [[], []]

    def close(self) -> None:
        self.sync.close()
        ray.get(self.balanced[-1].close.remote())
        for actor in (self.trainer, self.torch, *self.balanced):
            ray.kill(actor)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_an_update_writes_each_copy_where_it_is_now(fleet: Fleet) -> None:
    sync = fleet.sync
    first = sync.update_weights(1)
    fleet.check(0)
    for version, loads in enumerate(LOADS, start=2):  # version v has the weights of checkpoint 1 - v % 2
        before = sync.experts("e0")
        fleet.ask("balance", loads)
        assert sync.experts("e0") != before
        fleet.check(version % 2)
        fleet.train(1 - version % 2)
        report = sync.update_weights(version)
        assert report.engines == {"e0": version, "e1": version}
        assert report.proofs == {"e0": "live weights", "e1": "live weights"}
        assert report.epoch == first.epoch, "nobody else was planned again"
        fleet.check(1 - version % 2)
    fleet.ask("balance", LOADS[0])
    assert sync.heal("e0").engines == {"e0": 3, "e1": 3}
    fleet.check(0)


def test_experts_move_on_request_and_damage_is_found_and_healed(fleet: Fleet) -> None:
    sync = fleet.sync
    sync.update_weights(1)
    wanted = [[5, 5, 1, 2, 3, 4, 0, 7, 6, 5], [7, 6, 5, 4, 3, 2, 1, 0, 7, 6]]
    report = sync.move_experts({"e0": wanted})
    assert sync.experts("e0") == wanted
    assert report.engines == {"e0": 1, "e1": 1}
    assert list(report.phases) == ["pause", "move", "layout", "verify", "commit"]
    fleet.check(0)

    fleet.ask("flip", 0, 1)  # on rank 0 the second copy of expert 5, which stays a copy
    with pytest.raises(VerifyError, match=r"layers\.0\.mlp\.experts\.down_proj"):
        sync.move_experts({"e0": wanted})
    sync.settle(patient(60))
    assert [heal.engine for heal in sync.heals] == ["e0"]
    fleet.check(0)
    fleet.train(1)
    assert sync.update_weights(2).engines == {"e0": 2, "e1": 2}
    fleet.check(1)
    assert run_block("docs/experts.md", 2, {"sync": sync})["report"].version == 2
    assert sync.experts("e0")[0] != wanted[0]
    fleet.check(1)


def test_a_rank_that_is_killed_while_experts_move_comes_back(fleet: Fleet) -> None:
    sync = fleet.sync
    sync.update_weights(1)
    wanted = [row[::-1] for row in sync.experts("e0")]
    sync.inject(FaultPlan((Fault(process="engine e0", action="kill", at="move", rank=1),)))
    with pytest.raises(RankLostError, match="rank 1"):
        sync.move_experts({"e0": wanted})
    assert [*sync.serving()] == ["e1"]
    sync.settle(patient(200))
    assert sync.engine_versions() == {"e0": 1, "e1": 1}
    fleet.check(0)
    sync.move_experts({"e0": wanted})
    fleet.check(0)
    fleet.train(1)
    assert sync.update_weights(2).engines == {"e0": 2, "e1": 2}
    fleet.check(1)


def test_slots_that_cannot_hold_the_experts(fleet: Fleet) -> None:
    sync = fleet.sync
    now = sync.experts("e0")
    with pytest.raises(ConfigError, match=r"engine: 'e2'"):
        sync.experts("e2")
    for engine, experts, says in (
        ("e1", now, "experts: 'e1' .* it does not move experts"),
        ("e0", now[:1], "experts: 1 .* 2 layers"),
        ("e0", [now[0], now[1][1:]], r"experts\.e0\[1\]: 9 .* all 10 slots"),
        ("e0", [now[0], [8, *now[1][1:]]], r"experts\.e0\[1\]: 8 .* from 0 to 7"),
        ("e0", [now[0], [1, *now[1][1:8], 1, 1]], r"each expert a slot: 0 has none"),
    ):
        with pytest.raises(ConfigError, match=says):
            sync.move_experts({engine: experts})
