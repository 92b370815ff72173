"""Holders that a holder of their host has move, in the driver's place, over real Ray actors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from tests.fleets.actors import Engine, Trainer, forget, spawn
from tests.fleets.faulty import pid
from tests.fleets.intercept import names_called
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.relays import relays
from weightsync.errors import DeadlineError, PeerError, PeerLostError, WeightSyncError
from weightsync.faults import Fault, FaultPlan

WIDTH = 64
TIMEOUT_S = patient(0.5)


@pytest.fixture(scope="module")
def actors(cluster: None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    trainers = [spawn(Trainer, WIDTH, f"moves-{rank}") for rank in range(2)]
    engines = {name: spawn(Engine, WIDTH, name, f"moves-{name}") for name in ("e0", "e1")}
    yield trainers, engines
    for actor in (*trainers, *engines.values()):
        ray.kill(actor)


@pytest.fixture
def called_directly() -> Iterator[list[str]]:
    """The holders that the driver has move itself."""
    with names_called("move") as names:
        yield names


class Fleet:
    def __init__(self, trainers: list[Any], engines: dict[str, Any], called_directly: list[str]) -> None:
        config = SyncConfig(bucket_bytes=4096, timeout_s=TIMEOUT_S, connect_timeout_s=patient(60))
        self.sync, self.version, self.called_directly = WeightSync(config), 0, called_directly
        self.trainers, self.engines = trainers, engines
        self.sync.register_trainers(trainers)
        self.sync.register_engines(engines)
        self.sync.connect()

    def update(self) -> None:
        """Update, and compare the engines' weights with the trainers'."""
        self.version += 1
        self.called_directly.clear()
        ray.get([trainer.train.remote(self.version) for trainer in self.trainers])
        report = self.sync.update_weights(self.version)
        assert report.engines == dict.fromkeys(self.engines, self.version)
        assert {f"holder {index}" for index in range(4)} <= report.spans.keys()
        wanted = ray.get(self.trainers[0].weights.remote())
        for engine in self.engines.values():
            found = ray.get(engine.weights.remote())
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())

    def update_through_relays(self) -> None:
        """Update until no holder is called directly, as once relays are connected."""
        for _ in range(50):
            self.update()
            if not self.called_directly:
                return
        raise AssertionError(self.called_directly)

    def fails(self, process: str, action: Any) -> WeightSyncError:
        self.version += 1
        fault = Fault(process=process, action=action, at="move", version=self.version)
        self.sync.inject(FaultPlan((fault,)))
        self.called_directly.clear()
        with pytest.raises(WeightSyncError) as caught:
            self.sync.update_weights(self.version)
        return caught.value


@pytest.fixture
def fleet(
    actors: tuple[list[Any], dict[str, Any]], called_directly: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setattr(relays, "MAX_DIRECT_HOSTS", 0)
    forget(actors[1].values())
    made = Fleet(*actors, called_directly)
    yield made
    made.sync.close()


def test_a_holder_that_fails_is_told_under_its_name_and_others_are_not_blamed(fleet: Fleet) -> None:
    fleet.update_through_relays()
    error = fleet.fails("holder 1", "error")
    assert isinstance(error, PeerError)
    assert str(error).startswith("holder 1 failed: RuntimeError: injected")
    assert fleet.called_directly == []
    fleet.update_through_relays()
    error = fleet.fails("holder 1", "kill")
    assert isinstance(error, PeerLostError)
    assert error.peer == "holder 1"
    assert fleet.called_directly == []
    fleet.update_through_relays()


def test_the_driver_calls_itself_once_the_holder_that_relays_is_killed(fleet: Fleet) -> None:
    fleet.update_through_relays()
    error = fleet.fails("holder 0", "kill")
    assert isinstance(error, PeerLostError)
    assert error.peer == "holder 0"
    assert "holder 0" in fleet.called_directly
    fleet.update_through_relays()


@pytest.mark.faults
@pytest.mark.parametrize("process", ["holder 0", "holder 1"], ids=["relays", "is called by it"])
def test_a_holder_that_hangs_is_named_alone(fleet: Fleet, process: str) -> None:
    fleet.update_through_relays()
    stopped = pid(fleet.sync.holders()[process])
    error = fleet.fails(process, "hang")
    os.kill(stopped, signal.SIGCONT)
    assert isinstance(error, DeadlineError)
    assert (error.phase, error.missing) == ("move", (process,))
    assert bool(fleet.called_directly) == (process == "holder 0")
    fleet.update_through_relays()


def test_holders_of_few_hosts_and_single_ones_are_called_by_the_driver() -> None:
    holders: list[Any] = [SimpleNamespace(name=f"holder {index}", handle=index) for index in range(11)]
    nodes = [f"host {index % 10}" for index in range(11)]
    relayed = relays.move_relays(NodeLinks(None), holders, nodes)
    assert [tuple(each.holders) for each in relayed] == [(0, 10)]
    assert relays.move_relays(NodeLinks(None), holders[:8] * 2, nodes[:8] * 2) == []
