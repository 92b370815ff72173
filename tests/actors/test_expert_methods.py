"""Experts move by the public door, between updates and by themselves."""

from __future__ import annotations

import pytest
import ray
import torch

from tests.fleets.actors import spawn
from tests.fleets.slot_engine import START, SlotActor, StackTrainer
from tests.pages import run_block
from tests.patience import patient
from weightsync import ConfigError, StateError, SyncConfig, WeightSync


def test_experts_move_on_request_and_updates_follow_those_that_moved() -> None:
    trainer = spawn(StackTrainer, "0")
    engines = {f"e{i}": spawn(SlotActor, f"e{i}", str(i)) for i in range(2)}

    def check(name: str, slots: list[int], num_attached: int) -> None:
        found, tensors, count = ray.get(engines[name].held.remote())
        assert (found, count) == (slots, num_attached)
        assert torch.equal(tensors["experts"], weights["experts"][slots])
        assert torch.equal(tensors["norm"], weights["norm"])

    with WeightSync(SyncConfig(bucket_bytes=4096, timeout_s=patient(20))) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        with pytest.raises(StateError, match=r"connect\(\)"):
            sync.experts("e0")
        sync.connect()
        with pytest.raises(StateError, match="engine e0 does not serve version 0"):
            sync.move_experts({"e0": [START]})
        weights = ray.get(trainer.train.remote(1))
        sync.update_weights(1)
        assert sync.experts("e0") == [[*START]]
        report = run_block("docs/experts.md", 2, {"sync": sync})["report"]
        assert report.engines == {"e0": 1, "e1": 1}
        check("e0", [1, 2, 3, 0, 0], 2)
        check("e1", [*START], 1)
        ray.get(engines["e1"].balance.remote([3, 3, 2, 1, 0]))
        weights = ray.get(trainer.train.remote(2))
        assert sync.update_weights(2).engines == {"e0": 2, "e1": 2}
        check("e0", [1, 2, 3, 0, 0], 2)
        check("e1", [3, 3, 2, 1, 0], 2)
        with pytest.raises(ConfigError, match="give each expert a slot: 3 has none"):
            sync.move_experts({"e0": [[0, 0, 1, 2, 2]]})
    for actor in (trainer, *engines.values()):
        ray.kill(actor)
