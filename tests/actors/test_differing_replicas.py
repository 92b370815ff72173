"""Plain trainers with other seeds, over real Ray actors: no engine serves a mix of their tensors."""

from __future__ import annotations

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, spawn
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ReplicasDifferError

WIDTH = 32


def test_two_plain_trainers_with_other_seeds_are_named_and_no_engine_serves_a_mix() -> None:
    trainers = [spawn(Trainer, WIDTH, f"differing-{rank}") for rank in range(2)]
    engine = spawn(Engine, WIDTH, "e0", "differing-e0")
    with WeightSync(SyncConfig(timeout_s=patient(30))) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        sync.connect()
        ray.get([trainer.train.remote(seed) for seed, trainer in enumerate(trainers)])
        with pytest.raises(ReplicasDifferError, match=r"trainer 0, trainer 1 in .*0\.weight") as caught:
            sync.update_weights(1)
        assert all(len(tensors) == 4 for _, tensors in caught.value.differing)
        assert not sync.serving()
        ray.get([trainer.train.remote(7) for trainer in trainers])
        assert sync.update_weights(2).engines == {"e0": 2}
        wanted, found = ray.get([trainers[1].weights.remote(), engine.weights.remote()])
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for actor in (*trainers, engine):
        ray.kill(actor)
