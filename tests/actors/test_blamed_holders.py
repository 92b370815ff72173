"""A holder or a trainer that fails is named, alone and in time, and no engine is respawned for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import ray

from tests.fleets.actors import Harming, Trainer, spawn, until
from tests.fleets.faulty import Heard, pid, starve
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.driver.connecting.connect import Connection, connect
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S
from weightsync.errors import DeadlineError, PeerError, PeerLostError, WeightSyncError

pytestmark = pytest.mark.timeout(120)
WIDTH = 64
TIMEOUT_S = patient(0.5)
CONFIG = SyncConfig(
    bucket_bytes=4096,
    timeout_s=TIMEOUT_S,
    connect_timeout_s=patient(60),
    heartbeat_s=patient(60),
    heal_backoff_s=0.05,
    heal_attempts=5,
)
BETWEEN_S = patient(2)
"""What a call may take beside its wait for somebody who is silent."""


class Blaming:
    """Two trainers, and two engines: e0 is with trainer 0, e1 has a holder of its own."""

    def __init__(self) -> None:
        self.log, self.respawned = Heard(), list[str]()
        self.trainers = [spawn(Trainer, WIDTH, f"blame-{rank}") for rank in range(2)]
        engines = {"e0": self._engine("e0", "blame-0"), "e1": self._engine("e1", "blame-x")}
        self.standby = self._engine("e1", "blame-x")
        self.started = [*self.trainers, *engines.values(), self.standby]
        ray.get([actor.__ray_ready__.remote() for actor in self.started])
        self.sync = WeightSync(CONFIG)
        self.sync.register_trainers(self.trainers)
        self.sync.register_engines(engines, respawn=self._respawn)
        self.sync.connect()
        self.version = 0

    def close(self) -> None:
        self.log.close()
        self.sync.close()
        for actor in self.started:
            ray.kill(actor)

    def __getitem__(self, engine: str) -> Any:
        return self.sync.engines()[engine]

    def begin(self) -> None:
        """All is well before each test."""
        ray.get(self.standby.__ray_ready__.remote())
        self.settle()
        self.update_all()
        self.settle()
        self.respawned.clear()
        self.log.clear()

    def update_all(self) -> None:
        self.version += 1
        report = self.sync.update_weights(self.version)
        assert report.engines == {"e0": self.version, "e1": self.version}, report

    def settle(self) -> None:
        self.sync.settle(patient(60))

    def holder(self) -> tuple[str, Any]:
        """The one of e1, by the name that errors give it."""
        (place,) = dict(self.sync.plan.members.engines)["e1"]
        return f"holder {place}", self.sync.holders()[f"holder {place}"]

    def fails_to_connect(self) -> WeightSyncError:
        with pytest.raises(WeightSyncError) as caught:
            self.sync.connect()
        return caught.value

    @contextmanager
    def connecting_within(self, seconds: float) -> Iterator[None]:
        """Everybody has started: what is left to wait for is somebody silent."""

        async def connect_within(fleet: Fleet, config: SyncConfig, *args: Any) -> Connection:
            return await connect(fleet, replace(config, connect_timeout_s=seconds), *args)

        with mock.patch("weightsync.driver.updating.controller.connect", connect_within):
            yield

    def serve(self) -> None:
        """Every engine answers with the version that was committed last."""
        assert set(self.sync.serving()) == {"e0", "e1"}
        for handle in self.sync.serving().values():
            assert ray.get(handle.generate.remote([[1]], {}), timeout=patient(10)).version == self.version

    def _engine(self, name: str, slot: str) -> Any:
        return spawn(Harming, WIDTH, name, slot)

    def _respawn(self, name: str) -> Any:
        self.respawned.append(name)
        taken, self.standby = self.standby, self._engine(name, "blame-x")
        self.started.append(self.standby)
        return taken


@pytest.fixture(scope="module")
def fleet(cluster: None) -> Iterator[Blaming]:
    made = Blaming()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def well(fleet: Blaming) -> None:
    fleet.begin()


@contextmanager
def going_on(number: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.kill(number, signal.SIGCONT)


def test_a_holder_that_is_stopped_while_engines_connect_is_named_alone(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    stopped = pid(handle)
    ray.get(fleet["e1"].harm.remote(stopped, signal.SIGSTOP))
    with going_on(stopped), fleet.connecting_within(2 * TIMEOUT_S):
        begun = time.monotonic()
        error = fleet.fails_to_connect()
        took = time.monotonic() - begun
    assert isinstance(error, DeadlineError), error
    assert error.missing == (name,), error
    assert took < 2 * TIMEOUT_S + GRACE_S + BETWEEN_S
    fleet.serve()
    fleet.sync.connect()
    assert fleet.holder() == (name, handle), "it is the same process"
    fleet.update_all()
    assert not fleet.respawned


def test_a_holder_that_is_killed_while_engines_connect_is_named_at_once(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    ray.get(fleet["e1"].harm.remote(pid(handle), signal.SIGKILL))
    begun = time.monotonic()
    error = fleet.fails_to_connect()
    assert time.monotonic() - begun < BETWEEN_S
    assert isinstance(error, PeerLostError), error
    assert error.peer == name
    fleet.serve()
    fleet.sync.connect()
    fleet.update_all()
    assert not fleet.respawned


def test_a_holder_that_is_stopped_while_an_engine_comes_back_is_named_alone(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    stopped = pid(handle)
    ray.get(fleet.standby.harm.remote(stopped, signal.SIGSTOP))
    with going_on(stopped):
        ray.kill(fleet["e1"])
        assert until(lambda: "REFILL" in fleet.log.text(), patient(60))
    told = fleet.log.text()
    assert f": no answer within {TIMEOUT_S:g} s from {name}" in told, told
    assert "from engine" not in told, told
    fleet.settle()
    assert fleet.respawned == ["e1"], "its process is started once, since it was killed"
    assert fleet.sync.engine_states()["e1"] is EngineState.SERVING
    fleet.serve()
    fleet.update_all()


def test_a_holder_that_is_killed_while_an_engine_comes_back_is_named_at_once(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    ray.get(fleet.standby.harm.remote(pid(handle), signal.SIGKILL))
    ray.kill(fleet["e1"])
    assert until(lambda: f"{name} is gone" in fleet.log.text(), patient(60))
    assert "no answer" not in fleet.log.text()
    fleet.settle()
    assert fleet.respawned == ["e1"], "its process is started once, since it was killed"
    fleet.update_all()
    fleet.serve()


def test_a_holder_without_file_descriptors_is_named_and_its_engine_is_filled_again(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    ray.get(handle.__ray_call__.remote(starve))
    ray.kill(fleet["e1"])
    assert until(lambda: "serves" in fleet.log.text(), patient(60))
    fleet.settle()
    assert f"{name} failed: it has no file descriptors left" in fleet.log.text()
    assert fleet.respawned == ["e1"], "its process is started once, since it was killed"
    assert fleet.holder() == (name, handle)
    fleet.serve()


def test_a_holder_without_file_descriptors_is_named_while_engines_connect(fleet: Blaming) -> None:
    name, handle = fleet.holder()
    ray.get(handle.__ray_call__.remote(starve))
    begun = time.monotonic()
    error = fleet.fails_to_connect()
    assert time.monotonic() - begun < BETWEEN_S
    assert isinstance(error, PeerError), error
    assert str(error).startswith(f"{name} failed: it has no file descriptors left")
    fleet.serve()
    fleet.sync.connect()
    fleet.update_all()
    assert not fleet.respawned


def test_a_trainer_that_is_stopped_while_it_publishes_is_named_alone(fleet: Blaming) -> None:
    stopped = pid(fleet.trainers[1])
    os.kill(stopped, signal.SIGSTOP)
    with going_on(stopped):
        begun = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            fleet.sync.update_weights(fleet.version + 1)
        took = time.monotonic() - begun
        assert (caught.value.phase, caught.value.missing) == ("publish", ("trainer 1",))
        assert TIMEOUT_S <= took < TIMEOUT_S + BETWEEN_S
        fleet.serve()
    fleet.update_all()
    assert not fleet.respawned
