"""Trainers whose models change, are written during `publish`, or differ: no engine serves a mix."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Restless, Trainer, Uncounted, spawn
from tests.fleets.changed import OTHER, WIDTH, Moving, another, another_parameter, there_and_back
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ReplicasDifferError, SourceChangedError, StateError


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
    with caplog.at_level(logging.INFO, "weightsync.driver"):
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


WIDE = 2048


def update_often(sync: WeightSync) -> None:
    for version in range(1, 50):
        sync.update_weights(version)


@pytest.mark.faults  # test_rewritten holds it without Ray
def test_a_trainer_that_writes_while_it_publishes_is_named_and_engines_come_back() -> None:
    trainer = spawn(Restless, WIDE, "t0")
    engines = {name: spawn(Engine, WIDE, name, name) for name in ("e0",)}
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
    trainer, engine = spawn(Uncounted, WIDE, "t0"), spawn(Engine, WIDE, "e0", "e0")
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
