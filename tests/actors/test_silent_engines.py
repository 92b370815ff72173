"""Engines that fall silent and are heard again: they join again by themselves, in their own process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, spawn, until
from tests.fleets.faulty import pid
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.engine_state import EngineState
from weightsync.report import SyncReport

WIDTH = 64
CONFIG = SyncConfig(
    bucket_bytes=4096, timeout_s=patient(2), connect_timeout_s=patient(60), heartbeat_s=patient(0.25)
)


class Fleet:
    """A trainer and two engines, of which e1 falls silent."""

    def __init__(self, respawn: Callable[[str], Any] | None = None, **settings: Any) -> None:
        self.trainer = spawn(Trainer, WIDTH, "silent-t")
        self.engines = {name: spawn(Engine, WIDTH, name, f"silent-{name}") for name in ("e0", "e1")}
        self.sync = WeightSync(SyncConfig(**{**vars_of(CONFIG), **settings}))
        self.sync.register_trainers([self.trainer])
        self.sync.register_engines(self.engines, respawn=respawn)
        self.sync.connect()
        self.update(1)
        self.sync.settle(patient(20))

    def update(self, version: int) -> SyncReport:
        ray.get(self.trainer.train.remote(version))
        return self.sync.update_weights(version)

    def holder(self) -> Any:
        return self.sync.holders()[f"holder {dict(self.sync.plan.members.engines)['e1'][0]}"]

    def is_dead(self) -> bool:
        return self.sync.engine_states()["e1"] is EngineState.DEAD

    def serves(self, version: int) -> bool:
        """Whether e1 serves a version, with the bytes that it has."""
        if self.sync.engine_versions()["e1"] != version:
            return False
        served, held = ray.get(
            [self.engines["e1"].sync_serving.remote(), self.engines["e1"].weights.remote()]
        )
        wanted = ray.get(self.trainer.weights.remote())
        return served == version and all(torch.equal(wanted[name], held[name]) for name in wanted)

    def close(self) -> None:
        self.sync.close()
        for actor in (self.trainer, *self.engines.values()):
            ray.kill(actor)


def vars_of(config: SyncConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.fixture
def fleets(cluster: None) -> Iterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.close()


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in pids:
            with contextlib.suppress(ProcessLookupError):  # it was respawned
                os.kill(each, signal.SIGCONT)


def test_an_engine_that_is_heard_again_is_filled_and_serves(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet())
    with stopped(pid(fleet.engines["e1"])):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
    assert until(lambda: fleet.serves(2), patient(20))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}


@pytest.mark.faults
def test_one_whose_holder_is_silent_too_costs_no_update_and_gets_a_new_holder(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet())
    with stopped(pid(fleet.engines["e1"]), pid(fleet.holder())):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
    assert until(lambda: fleet.serves(2), patient(30))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}


@pytest.mark.faults
def test_one_that_no_snapshot_can_fill_takes_the_next_update(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet(keep_versions=1))
    with stopped(pid(fleet.engines["e1"])):
        assert until(fleet.is_dead, patient(5))
    assert until(lambda: not fleet.is_dead(), patient(20))
    assert fleet.sync.engine_versions()["e1"] == 0
    assert fleet.update(2).engines == {"e0": 2, "e1": 2}


@pytest.mark.faults
def test_one_whose_host_is_cut_off_keeps_its_process_and_one_that_hangs_is_respawned(
    fleets: list[Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    started: list[str] = []

    def respawn(name: str) -> Any:
        started.append(name)
        fleet.engines[name] = spawn(Engine, WIDTH, name, f"silent-again-{name}")
        return fleet.engines[name]

    fleets.append(fleet := Fleet(respawn=respawn))
    engine = pid(fleet.engines["e1"])
    with stopped(engine, pid(fleet.holder())):
        assert until(fleet.is_dead, patient(5))
        assert fleet.update(2).engines["e0"] == 2
        assert until(lambda: "its host is lost: waiting for it" in caplog.text, patient(10))
    assert until(lambda: fleet.serves(2), patient(30))
    fleet.sync.settle(patient(20))
    assert fleet.update(3).engines == {"e0": 3, "e1": 3}
    assert (started, pid(fleet.engines["e1"])) == ([], engine)
    assert fleet.sync.heals[-1].respawned_at is None

    with stopped(engine):  # its holder answers, so it hangs
        assert until(lambda: started == ["e1"], patient(20))
    assert until(lambda: fleet.serves(3), patient(30))
