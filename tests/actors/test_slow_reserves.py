"""Holders take long to allocate memory for copies: nobody who connects or updates waits for it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.patience import patient
from weightsync import DeadlineError, SyncConfig, WeightSync
from weightsync.testing import Fault, FaultPlan

CONFIG = SyncConfig(bucket_bytes=4096, timeout_s=patient(10), connect_timeout_s=patient(30))
WIDTH = 64
SLOW_S = patient(1)
THERE = "memory for copies is there after"


class Rig:
    """A trainer and two engines, connected, and a fault of the trainer's holder from the next connect on."""

    def __init__(self, action: Any) -> None:
        self.trainer = spawn(Trainer, WIDTH, "t")
        self.sync = WeightSync(CONFIG)
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines({name: spawn(Engine, WIDTH, name, name) for name in ("e0", "e1")})
        self.sync.connect()
        self.sync.settle(patient(10))
        fault = Fault(process="holder 0", action=action, at="reserve", seconds=SLOW_S)
        self.sync.inject(FaultPlan((fault,)))

    def update(self, version: int) -> None:
        ray.get(self.trainer.train.remote(version))
        report = self.sync.update_weights(version)
        assert report.engines == {"e0": version, "e1": version}
        assert "reserve" not in report.connect_phases

    def is_filled_again(self) -> bool:
        """Have an engine take the committed version from the holders."""
        report = self.sync.heal("e1")
        held, wanted = ray.get([self.sync.engines()["e1"].weights.remote(), self.trainer.weights.remote()])
        same = all((held[name] == tensor).all() for name, tensor in wanted.items())
        return report.verified and same and [*report.bytes_from] == ["holder 0"]


@pytest.fixture
def slow(caplog: pytest.LogCaptureFixture) -> Iterator[Rig]:
    caplog.set_level(logging.INFO, "weightsync")
    rig = Rig("slow")
    assert caplog.text.count(THERE) == 1
    gc.collect()  # asyncio logs a task that nobody asked for its error when it goes
    caplog.clear()
    yield rig
    rig.sync.close()


def test_connect_and_updates_do_not_wait_and_settle_does(slow: Rig, caplog: pytest.LogCaptureFixture) -> None:
    slow.sync.connect()
    for version in (1, 2, 3):
        slow.update(version)
    assert set(slow.sync.serving()) == {"e0", "e1"}
    assert THERE not in caplog.text
    with pytest.raises(DeadlineError, match=r"copying the committed version: no answer .* from holders"):
        slow.sync.settle(0.01)
    slow.sync.settle(patient(20))
    (line,) = (each.getMessage() for each in caplog.records if THERE in each.getMessage())
    assert float(line.split()[-2]) >= SLOW_S
    assert slow.is_filled_again()


def test_a_fleet_that_connects_again_meanwhile_keeps_versions(
    slow: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    slow.sync.connect()
    slow.sync.connect()
    slow.update(1)
    slow.sync.settle(patient(20))
    assert caplog.text.count(THERE) == 2
    assert "not every holder" not in caplog.text
    assert slow.is_filled_again()


def test_an_engine_that_joins_meanwhile_is_filled(slow: Rig) -> None:
    slow.sync.connect()
    slow.update(1)
    report = slow.sync.add_engine("e2", spawn(Engine, WIDTH, "e2", "e2"))
    assert report is not None
    assert report.engines == {"e0": 1, "e1": 1, "e2": 1}


def test_who_leaves_meanwhile_leaves_nothing_behind(slow: Rig, caplog: pytest.LogCaptureFixture) -> None:
    holders = [*slow.sync.holders().values()]
    pids = ray.get([holder.__ray_call__.remote(lambda _: psutil.Process().pid) for holder in holders])
    slow.sync.connect()
    slow.update(1)
    slow.sync.close()
    assert until(lambda: not any(map(psutil.pid_exists, pids)), patient(10))
    gc.collect()  # as in the fixture
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []
    assert THERE not in caplog.text


def test_a_holder_that_ends_meanwhile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("kill")
    with rig.sync as sync:
        sync.connect()
        sync.settle(patient(20))
        assert "not every holder can keep versions" in caplog.text
        rig.update(1)
        sync.settle(patient(20))
        assert rig.is_filled_again()
