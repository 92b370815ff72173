"""Adapters of servers and of trainer ranks that Ray did not start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest
import ray
import torch

from tests.fleets.actors import Trainer, spawn, until
from tests.fleets.joined import JoinedProcess
from tests.fleets.served import ServedProcess, can_be_apart, digest, free_port
from tests.fleets.slots import AdapterTrainer, SlotActor
from tests.pages import run_block
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError

WIDTH, TOKEN = 32, "a secret of the fleet"


class Fleet:
    """An actor and a server as engines, a base from an actor, and two ranks that train an adapter."""

    def __init__(self, apart: bool) -> None:
        self.port, self.apart = free_port(), apart
        self.env = os.environ | {
            "WEIGHTSYNC_JOIN": f"{ray.util.get_node_ip_address()}:{self.port}",
            "ADAPTER": "yes",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        self.actors = [spawn(Trainer, WIDTH, "t"), spawn(SlotActor, WIDTH, "e0", "e0")]
        self.ranks = [self.start_rank(rank) for rank in range(2)]
        self.server = self.start_server()

    def start_rank(self, rank: int) -> JoinedProcess:
        return JoinedProcess(WIDTH, self.env | {"RANK": str(rank)})

    def start_server(self) -> ServedProcess:
        return ServedProcess(8000, WIDTH, self.env, apart=self.apart)

    def holds(self, version: int, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether both engines have a version of the adapter, with these bytes."""
        held, tensors = ray.get(self.actors[1].adapter.remote("math"))
        wanted = version, digest(weights)
        return (held, digest(tensors)) == wanted == self.server.holds("math")

    def close(self) -> None:
        for process in (*self.ranks, self.server):
            process.kill()
        for actor in self.actors:
            ray.kill(actor)


@pytest.fixture(params=[False, True], ids=["on the driver's host", "on another host"])
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    if request.param and not can_be_apart():
        pytest.skip("this user cannot make namespaces")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


def adapter_of(seed: int) -> Mapping[str, torch.Tensor]:
    """The adapter after update `seed` of a rank's process."""
    trainer = AdapterTrainer("")
    trainer.train(seed)
    return trainer.weights()


def test_ranks_train_what_a_server_serves_killed_and_started_again(fleet: Fleet) -> None:
    config = SyncConfig(
        join_port=fleet.port,
        timeout_s=patient(20),
        connect_timeout_s=patient(40),
        heartbeat_s=patient(1),
    )
    url = f"http://{ray.util.get_node_ip_address()}:8000"
    with WeightSync(config) as sync:
        sync.register_trainers([fleet.actors[0]])
        sync.register_engines({"e0": fleet.actors[1], "served": url})
        sync.connect()
        sync.update_weights(1)
        run_block("docs/servers.md", 3, {"sync": sync})
        assert fleet.holds(1, adapter_of(1))
        assert [rank.said() for rank in fleet.ranks] == ["1", "1"]
        report = sync.update_weights(2, components=["model", "adapter math"])
        assert all(its.engines == {"e0": 2, "served": 2} for its in report.components.values())
        assert fleet.holds(2, adapter_of(2))
        assert not until(lambda: {row.version for row in sync.coverage()} != {2}, 2.5 * config.heartbeat_s)
        with pytest.raises(ConfigError, match="so many ranks join already"):
            sync.register_adapter("code", 3)

        fleet.server.kill()
        fleet.server = fleet.start_server()
        assert until(lambda: fleet.holds(2, adapter_of(2)), patient(60)), sync.engine_states()
        assert [rank.said() for rank in fleet.ranks] == ["2", "2"]
        fleet.ranks[1].kill()
        fleet.ranks[0].kill()  # its replica, as torchrun does
        fleet.ranks = [fleet.start_rank(rank) for rank in range(2)]
        assert sync.update_adapter("math").engines == {"e0": 3, "served": 3}
        assert fleet.holds(3, adapter_of(1))
        sync.unregister_adapter("math")
        assert fleet.server.holds("math") == (0, "none")
