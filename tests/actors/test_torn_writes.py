"""A trainer whose own thread goes on writing while its weights are published, over real Ray actors."""

from __future__ import annotations

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Restless, Uncounted, spawn
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import SourceChangedError

WIDTH = 2048


def update_often(sync: WeightSync) -> None:
    for version in range(1, 50):
        sync.update_weights(version)


@pytest.mark.faults  # test_rewritten holds it without Ray
def test_a_trainer_that_writes_while_it_publishes_is_named_and_engines_come_back() -> None:
    trainer = spawn(Restless, WIDTH, "t0")
    engines = {name: spawn(Engine, WIDTH, name, name) for name in ("e0",)}
    with WeightSync(SyncConfig(timeout_s=patient(30))) as sync:
        sync.register_trainers([trainer])
        sync.register_engines(engines)
        sync.connect()
        ray.get(trainer.begin.remote())
        with pytest.raises(SourceChangedError, match=r"trainer 0 wrote 0\.weight while it was read"):
            update_often(sync)
        ray.get(trainer.end.remote())
        sync.settle(patient(60))
        report = sync.update_weights(50)
        assert report.engines == {"e0": 50}
        wanted = ray.get(trainer.weights.remote())
        for engine in engines.values():
            found = ray.get(engine.weights.remote())
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    for actor in (trainer, *engines.values()):
        ray.kill(actor)


@pytest.mark.faults  # test_tensors_written holds it without Ray
def test_a_version_that_commits_has_no_tensor_of_another_step() -> None:
    trainer, engine = spawn(Uncounted, WIDTH, "t0"), spawn(Engine, WIDTH, "e0", "e0")
    with WeightSync(SyncConfig(timeout_s=patient(30))) as sync:
        sync.register_trainers([trainer])
        sync.register_engines({"e0": engine})
        sync.connect()
        ray.get(trainer.begin.remote())
        refused = 0
        for version in range(1, 21):
            try:
                sync.update_weights(version)
            except SourceChangedError:
                refused += 1
                continue
            found = ray.get(engine.weights.remote())
            assert len({each.unique().numel() for each in found.values()}) == 1, "a tensor has two values"
            assert len({each.flatten()[0].item() for each in found.values()}) == 1, "tensors are of two steps"
        assert refused
        ray.get(trainer.end.remote())
        assert sync.update_weights(21).engines == {"e0": 21}
    for actor in (trainer, engine):
        ray.kill(actor)
