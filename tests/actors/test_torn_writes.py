"""A trainer whose own thread goes on writing while its weights are published, over real Ray actors."""

from __future__ import annotations

import pytest
import ray
import torch

from tests.actors.fleet import Engine, Restless, spawn
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
