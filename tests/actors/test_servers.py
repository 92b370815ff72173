"""Servers that Ray did not start dial in, and are engines."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from safetensors.torch import save_file

from tests.certificates import run_files
from tests.fleets.actors import Engine, Trainer, until
from tests.fleets.served import ServedProcess, can_be_apart, digest, free_port
from tests.pages import run_block
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import ConfigError
from weightsync.stores.local_folder import LocalFolder
from weightsync.stores.object_store import ObjectStore
from weightsync.stores.publishing import publish

WIDTH, TOKEN = 32, "a secret of the fleet"


class Fleet:
    """Two trainers, an actor as an engine, and a server as another, on a host of its own or on this one."""

    def __init__(self, apart: bool, tls: Path | None) -> None:
        self.port, self.apart = free_port(), apart
        self.env = {"WEIGHTSYNC_TLS": str(tls)} if tls else {}
        config = SyncConfig(
            join_port=self.port,
            tls=str(tls) if tls else None,
            timeout_s=patient(20),
            connect_timeout_s=patient(40),
            # With a long one, nobody has noticed the end of a server when it joins again.
            heartbeat_s=patient(60 if tls else 1),
        )
        self.sync = WeightSync(config)
        self.trainer = ray.remote(num_cpus=0)(Trainer).remote(WIDTH, "t")
        self.actor = ray.remote(num_cpus=0)(Engine).remote(WIDTH, "e0", "e0")
        self.server = self.start()

    def start(self, token: str = TOKEN, port: int = 8000) -> ServedProcess:
        driver = f"{ray.util.get_node_ip_address()}:{self.port}"
        env = os.environ | {"WEIGHTSYNC_JOIN": driver, "WEIGHTSYNC_TOKEN": token, "OMP_NUM_THREADS": "1"}
        env |= self.env
        return ServedProcess(port, WIDTH, env, apart=self.apart)

    def update(self, version: int) -> None:
        ray.get(self.trainer.train.remote(version))
        report = self.sync.update_weights(version)
        assert report.verified
        assert report.engines == {"e0": version, "served": version}
        assert self.server.holds() == (version, digest(ray.get(self.trainer.weights.remote())))

    def close(self) -> None:
        self.sync.close()
        self.server.kill()
        ray.kill(self.trainer)
        ray.kill(self.actor)


@pytest.fixture(
    params=[
        "on the driver's host",
        pytest.param("on another host", marks=pytest.mark.faults),
        "on another host, with TLS",
    ]
)
def fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fleet]:
    apart = request.param != "on the driver's host"
    if apart and not can_be_apart():
        pytest.skip("this user cannot make namespaces")
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    tls = tmp_path / "tls" if "TLS" in request.param else None
    if tls:
        run_files(tls)
    made = Fleet(apart, tls)
    yield made
    made.close()


def test_it_is_updated_killed_started_again_and_filled(fleet: Fleet) -> None:
    fleet.sync.register_trainers([fleet.trainer])
    url = f"http://{ray.util.get_node_ip_address()}:8000"
    fleet.sync.register_engines({"e0": fleet.actor, "served": url})
    fleet.sync.connect()
    for version in (1, 2, 3):
        fleet.update(version)
    assert fleet.sync.serving()["served"] == url

    fleet.server.kill()
    fleet.server = fleet.start()
    assert until(lambda: fleet.server.holds()[0] == 3, patient(50)), fleet.sync.engine_states()
    fleet.sync.settle(patient(30))
    assert fleet.server.holds() == (3, digest(ray.get(fleet.trainer.weights.remote())))
    fleet.update(4)

    fleet.sync.register_engines({"e0": fleet.actor, "served": f"{url}/"})
    fleet.sync.connect()
    assert fleet.sync.engine_versions() == {"e0": 4, "served": 4}
    fleet.update(5)


@pytest.mark.parametrize("fleet", ["on the driver's host"], indirect=True)
def test_a_second_server_at_one_url_gets_no_place_while_the_first_answers(fleet: Fleet) -> None:
    """Such as one that was started with a copied ``WEIGHTSYNC_URL``: requests would not go to it."""
    fleet.sync.register_trainers([fleet.trainer])
    fleet.sync.register_engines(
        {"e0": fleet.actor, "served": f"http://{ray.util.get_node_ip_address()}:8000"}
    )
    fleet.sync.connect()
    fleet.update(1)
    second = fleet.start()
    assert not until(lambda: second.holds()[0] or fleet.sync.heals, patient(1))
    fleet.update(2)

    fleet.server.stop()  # like a lost host: the connection stays
    assert until(lambda: second.holds()[0] == 2, patient(20))
    fleet.server.kill()
    fleet.server = second
    fleet.update(3)


@pytest.mark.parametrize("fleet", ["on another host, with TLS"], indirect=True)
def test_servers_and_actors_follow_a_store(fleet: Fleet, tmp_path: Path) -> None:
    """Versions come from a bucket, not from trainers. The store has two when the server joins."""
    store, copy = ObjectStore(f"file://{tmp_path}/store", make=True), LocalFolder(tmp_path / "copy")
    (files := tmp_path / "model").mkdir()

    def publish_one(seed: int) -> str:
        ray.get(fleet.trainer.train.remote(seed))
        save_file(held := ray.get(fleet.trainer.weights.remote()), files / "model.safetensors")
        publish(store, files, copy)
        return digest(held)

    publish_one(1)
    found = publish_one(2)
    url = f"http://{ray.util.get_node_ip_address()}:8000"
    fleet.sync.register_engines({"e0": fleet.actor, "served": url})
    fleet.sync.register_store(store.url, folder=str(tmp_path / "followed"))
    fleet.sync.connect()
    for version in (1, 2):
        report = fleet.sync.update_weights(checkpoint="store")
        assert (report.checkpoint, report.verified) == (f"store@{version + 1}", True)
        assert fleet.server.holds() == (version, found)
        assert digest(ray.get(fleet.actor.weights.remote())) == found
        found = publish_one(version + 2)

    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(copy.path)
    store, copy = ObjectStore(store.url, make=True), LocalFolder(copy.path)
    found = [publish_one(seed) for seed in (11, 12, 13)][-1]
    report = fleet.sync.update_weights(checkpoint="store")
    assert (report.checkpoint, fleet.server.holds()) == ("store@3", (3, found))

    fleet.sync.unregister_checkpoint("store")
    damaged = (tmp_path / "followed" / "current" / "model.safetensors").resolve()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    fleet.sync.register_store(store.url, folder=str(tmp_path / "followed"))
    assert fleet.sync.update_weights(checkpoint="store").verified
    assert fleet.server.holds() == (4, found)


@pytest.mark.parametrize("fleet", ["on another host, with TLS"], indirect=True)
def test_strangers_are_refused_while_the_pages_example_runs(fleet: Fleet) -> None:
    """One with another token, and one that is not registered, take no place, and keep nobody from it."""
    others = [fleet.start("a token of somebody else"), fleet.start(port=8001)]
    names = {"trainers": [fleet.trainer], "WeightSync": WeightSync, "SyncConfig": SyncConfig}
    replaced = {"29500": f"{fleet.port}, tls={fleet.env.get('WEIGHTSYNC_TLS')!r}", "10.0.0.7": "127.0.0.1"}
    with run_block("docs/servers.md", 0, names, replaced)["sync"]:
        assert fleet.server.holds() == (1, digest(ray.get(fleet.trainer.weights.remote())))
        for other in others:
            assert other.holds()[0] == 0
            other.kill()


@pytest.mark.parametrize(
    ("config", "url", "named"),
    [
        (SyncConfig(), "http://10.0.0.7:8000", "sync.join_port"),
        (SyncConfig(join_port=29500), "http://10.0.0.7", "such as http://10.0.0.7:8000"),
        (SyncConfig(join_port=29500), "10.0.0.7:8000", "such as http://10.0.0.7:8000"),
        (SyncConfig(join_port=29500), "http://[fd00::7:8000", "such as http://10.0.0.7:8000"),
    ],
)
def test_bad_input_is_named(
    config: SyncConfig, url: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    with WeightSync(config) as sync, pytest.raises(ConfigError, match=named):
        sync.register_engines({"e0": url})


def test_a_port_of_another_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as taken:
        port = taken.getsockname()[1]
        with WeightSync(SyncConfig(join_port=port)) as sync:
            sync.register_trainers(1)
            sync.register_engines({"e0": "http://10.0.0.7:8000"})
            with pytest.raises(ConfigError, match=rf"sync\.join_port: {port} .* in use on .* earlier driver"):
                sync.connect()


def test_a_token_is_needed() -> None:
    with (
        WeightSync(SyncConfig(join_port=29500)) as sync,
        pytest.raises(ConfigError, match="WEIGHTSYNC_TOKEN"),
    ):
        sync.register_engines({"e0": "http://10.0.0.7:8000"})
