"""The ranks of a script that Ray did not start dial in, and are trainers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from tests.fleets.actors import Engine
from tests.fleets.joined import JoinedProcess, trained
from tests.fleets.served import digest, free_port
from tests.pages import run_block
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError, PeerLostError, StateError
from weightsync.faults import Fault, FaultPlan

WIDTH, TOKEN = 32, "a secret of the fleet"


class Script:
    """The processes of two ranks."""

    def __init__(self, *, is_sharded: bool) -> None:
        self.port, self.is_sharded = free_port(), is_sharded
        self.ranks: dict[int, JoinedProcess] = {}
        self.start(0, 1)

    def start(self, *ranks: int, **more: str) -> None:
        env = os.environ | {
            "WEIGHTSYNC_JOIN": f"{ray.util.get_node_ip_address()}:{self.port}",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        if self.is_sharded:
            env |= {"FSDP2": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in ranks:
            self.ranks[rank] = JoinedProcess(WIDTH, env | {"RANK": str(rank)})

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.ranks[rank].kill()


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.faults)], ids=["layers", "FSDP2"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    script = Script(is_sharded=request.param)
    yield script
    script.kill(*script.ranks)


def test_it_is_updated_killed_and_started_again(script: Script) -> None:
    engine = ray.remote(num_cpus=0)(Engine).remote(WIDTH, "e0", "e0")
    config = SyncConfig(
        join_port=script.port,
        timeout_s=patient(20),
        connect_timeout_s=patient(40),
        heartbeat_s=patient(1),
    )

    def check(version: int, *seeds: int) -> None:
        """The engine has each rank's weights, after so many updates of the rank's process."""
        assert [rank.said() for rank in script.ranks.values()] == [str(version)] * 2
        layers = [trained(WIDTH, seed) for seed in seeds]
        wanted = {name: layers[int(name[0])][name] for name in layers[0]}
        assert digest(ray.get(engine.weights.remote())) == digest(wanted)

    names = {"engines": {"e0": engine}, "WeightSync": WeightSync, "SyncConfig": lambda **_: config}
    with run_block("docs/servers.md", 2, names)["sync"] as sync:
        check(1, 1, 1)
        for version in (2, 3):
            assert sync.update_weights(version).verified
            check(version, version, version)

        sync.inject(FaultPlan((Fault(process="trainer 1", action="kill", at="publish", version=4),)))
        with pytest.raises(PeerLostError, match="trainer 1"):
            sync.update_weights(4)
        assert script.ranks[0].said().startswith("PeerLostError: trainer 1")
        again = (0, 1) if script.is_sharded else (1,)
        script.kill(*again)
        script.start(*again)
        assert sync.update_weights(4).engines == {"e0": 4}
        check(4, 1 if script.is_sharded else 5, 1)
    ray.kill(engine)


def test_a_process_that_does_not_answer_gives_its_place_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process is stopped and keeps the connection, as a process on a lost host does."""
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    script, engine = Script(is_sharded=False), ray.remote(num_cpus=0)(Engine).remote(WIDTH, "e0", "e0")
    script.kill(1)
    script.start(1, STOPS="1")
    config = SyncConfig(join_port=script.port, connect_timeout_s=patient(10), heartbeat_s=patient(0.5))
    with WeightSync(config) as sync:
        sync.register_trainers(2)
        sync.register_engines({"e0": engine})
        sync.connect()
        assert sync.update_weights(1).verified
        stopped = script.ranks[1]
        assert stopped.said() == "1"
        script.start(1)
        assert sync.update_weights(2).engines == {"e0": 2}
        assert script.ranks[1].said() == "2"
        stopped.kill()
        script.kill(0, 1)
    ray.kill(engine)


def test_ranks_of_two_runs_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two hosts, where one process was killed, and the script started again before the other ends."""
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    script, engine = Script(is_sharded=True), ray.remote(num_cpus=0)(Engine).remote(WIDTH, "e0", "e0")
    config = SyncConfig(
        join_port=script.port,
        timeout_s=patient(20),
        connect_timeout_s=patient(40),
        heartbeat_s=patient(1),
    )
    with WeightSync(config) as sync:
        sync.register_trainers(2)
        sync.register_engines({"e0": engine})
        sync.connect()
        assert sync.update_weights(1).verified
        before = digest(ray.get(engine.weights.remote()))
        sync.connect()  # both ranks are in the next update(): else the second one fails without the first one
        script.kill(0)
        hangs = script.ranks[1]
        script.start(0, 1)
        with pytest.raises(StateError, match=r"trainer 0 .* and trainer 1 .* are of two runs of a script"):
            sync.update_weights(2)
        assert script.ranks[0].said().startswith("StateError: trainer 0")
        assert digest(ray.get(engine.weights.remote())) == before
        hangs.kill()
        script.kill(0, 1)
        script.start(0, 1)
        assert sync.update_weights(2).engines == {"e0": 2}
        script.kill(0, 1)
    ray.kill(engine)


def test_a_model_is_given_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    refused = pytest.raises(ConfigError, match=r"weightsync\.join")
    with WeightSync(SyncConfig(join_port=29500)) as sync, refused:
        sync.register_trainers(2, model="actor.model")
