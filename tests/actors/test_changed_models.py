"""What a trainer's self.model holds is what an update serves, or the update is refused; over Ray actors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, spawn
from tests.fleets.changed import OTHER, WIDTH, Moving, another, another_parameter, there_and_back
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import StateError


@pytest.fixture(scope="module")
def sync(cluster: None) -> Iterator[WeightSync]:
    trainers, engine = [spawn(Moving, WIDTH, f"t{i}") for i in range(2)], spawn(Engine, WIDTH, "e0", "e")
    made = WeightSync(SyncConfig(timeout_s=patient(60)))
    made.register_trainers(trainers)
    made.register_engines({"e0": engine})
    made.connect()
    yield made
    made.close()
    for actor in (*trainers, engine):
        ray.kill(actor)


def change(sync: WeightSync, how: Callable[[Trainer], object], *ranks: int) -> None:
    for rank in ranks:
        ray.get(sync.trainers()[rank].__ray_call__.remote(how))


def served(sync: WeightSync) -> dict[str, torch.Tensor]:
    return dict(ray.get(sync.engines()["e0"].weights.remote()))


def holds(sync: WeightSync) -> bool:
    wanted, found = ray.get(sync.trainers()[1].weights.remote()), served(sync)
    return wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_an_update_serves_what_the_model_holds_now_or_says_what_changed(sync: WeightSync) -> None:
    version = sync.version + 1
    sync.update_weights(version)
    for how in (another, there_and_back, another_parameter):
        change(sync, how, 0, 1)
        version += 1
        assert sync.update_weights(version).verified
        assert holds(sync), how
    for how, message in OTHER:
        before = served(sync)
        change(sync, how, 1)
        for _ in range(2):
            with pytest.raises(StateError, match=f"^trainer 1: {re.escape(message)}.*: connect\\(\\) again$"):
                sync.update_weights(version + 1)
        assert sync.engine_versions() == {"e0": version}
        assert [*sync.serving()] == ["e0"]
        assert all(torch.equal(before[name], tensor) for name, tensor in served(sync).items())
        change(sync, another, 0, 1)
        version += 1
        sync.update_weights(version)
        assert holds(sync), message


def test_weights_read_in_place_that_moved_are_connected_again_in_the_same_update(
    sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    sync.update_weights(sync.version + 1)
    version, epoch = sync.version + 1, sync.plan.epoch + 1
    ray.get([trainer.move.remote() for trainer in sync.trainers()])
    with caplog.at_level(logging.INFO, "weightsync.driver.updating.controller"):
        report = sync.update_weights(version)
    assert (report.version, report.epoch, report.engines) == (version, epoch, {"e0": version})
    assert holds(sync)
    assert any("connecting again: trainer 0: 0.weight is in" in each.getMessage() for each in caplog.records)
    assert sync.update_weights(version + 1).epoch == epoch


def test_what_connecting_again_does_not_help_is_said_first(sync: WeightSync) -> None:
    ray.get(sync.trainers()[0].move.remote())
    change(sync, OTHER[1][0], 1)
    with pytest.raises(StateError, match=r"^trainer 1: 2\.weight is new"):
        sync.update_weights(sync.version + 1)
