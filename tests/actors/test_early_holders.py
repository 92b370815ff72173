"""Holders of trainers' slots start while engines do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.actors.fleet import Trainer, spawn, until
from tests.actors.waiting_engine import WaitingEngine
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError

WIDTH = 16


@pytest.fixture
def trainers() -> Iterator[list[ray.actor.ActorHandle]]:
    made = [spawn(Trainer, WIDTH, f"early{i}") for i in range(2)]
    yield made
    for each in made:
        ray.kill(each)


def holders() -> set[int]:
    """The processes of all holders that have started."""
    running = psutil.process_iter(["cmdline"])
    return {each.pid for each in running if (each.info["cmdline"] or [""])[0].startswith("ray::Holder")}


def test_an_engine_that_starts_slowly_finds_holders_of_its_slot_started(
    trainers: list[ray.actor.ActorHandle], tmp_path: Path
) -> None:
    may_start = tmp_path / "start"
    engine = spawn(WaitingEngine, WIDTH, "e0", "early1", may_start)
    with WeightSync(SyncConfig(connect_timeout_s=patient(60))) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        before = holders()
        connecting = threading.Thread(target=sync.connect)
        connecting.start()
        assert until(lambda: len(holders() - before) == 2, patient(60))
        assert connecting.is_alive()
        early = holders() - before
        may_start.touch()
        connecting.join(patient(60))
        assert sync.plan.members.num_holders == 2
        assert holders() - before == early, "the engine shares a trainer's holder"
        assert sync.update_weights(1).engines == {"e0": 1}
    ray.kill(engine)


def test_a_transport_that_no_trainer_can_have_is_refused_as_before(
    trainers: list[ray.actor.ActorHandle], tmp_path: Path
) -> None:
    (tmp_path / "start").touch()
    engine = spawn(WaitingEngine, WIDTH, "e0", "early1", tmp_path / "start")
    with WeightSync(SyncConfig(transport="nccl", connect_timeout_s=patient(60))) as sync:
        sync.register_trainers(trainers)
        sync.register_engines({"e0": engine})
        before = holders()
        with pytest.raises(ConfigError, match="has no GPU: give auto"):
            sync.connect()
        assert holders() <= before
    ray.kill(engine)
