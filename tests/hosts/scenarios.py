"""What is tried on several hosts: python -m tests.hosts.scenarios NAME HEAD, on the first, under `lab`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from tests.fleets.actors import Engine, Trainer
from tests.hosts import (
    deltas,
    direct,
    encrypted,
    host_copies,
    live_sources,
    lost_links,
    quickstart_loop,
    servers,
)
from tests.hosts.lost_links import FOREVER_S
from tests.hosts.network import KERNELS_PORTS, SUBNET, second_address
from tests.hosts.outside import ask, put, say
from tests.patience import patient
from weightsync import SyncConfig, SyncReport, WeightSync
from weightsync.errors import TransportError

WIDTH = 1024
OTHERS = ("west", "east")
NBYTES = 4 * (WIDTH * WIDTH + WIDTH + 8 * WIDTH + 8)
PORTS = 29600, 29699
HEAD = f"{SUBNET}1"
MBIT_PER_S = 400
RAYS_PORTS = 10000, 19999
CONFIG = SyncConfig(
    bucket_bytes=1 << 20, timeout_s=patient(5), connect_timeout_s=patient(30), ports=PORTS, refill="zeromq"
)
Weights = Mapping[str, torch.Tensor]


def update(
    sync: WeightSync, trainer: Any, version: int, *, names: Sequence[str] = OTHERS, check: bool = True
) -> SyncReport:
    """Bring a version to the engines `names` and, with `check`, compare what they hold."""
    ray.get(trainer.train.remote(version))
    report = sync.update_weights(version)
    say(report)
    assert {name for name, served in report.engines.items() if served == version} == {*names}
    published: Weights = ray.get(trainer.weights.remote())
    for name in names if check else ():
        held: Weights = ray.get(sync.engines()[name].weights.remote())
        assert all(torch.equal(tensor, published[key]) for key, tensor in held.items()), name
    return report


def members(sync: WeightSync) -> tuple[Any, dict[str, Any]]:
    """Register a trainer on the first host and an engine on each other. Returns all of them."""
    trainer = put("head", Trainer, WIDTH, "t")
    engines = {name: put(name, Engine, WIDTH, name, name) for name in OTHERS}
    sync.register_trainers([trainer])
    sync.register_engines(engines)
    return trainer, engines


def fleet(sync: WeightSync) -> Any:
    """Register and connect a trainer on the first host and an engine on each other. Returns the trainer."""
    trainer, _ = members(sync)
    sync.connect()
    return trainer


def namespace(_: object) -> str:
    """Return the network namespace of this process."""
    return os.readlink("/proc/self/ns/net")


def listening(_: object) -> set[int]:
    """Return the ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def check_ports(sync: WeightSync) -> None:
    """Check that holders listen within their range, gloo within the kernel's, and Ray within its own."""
    found = ray.get([holder.__ray_call__.remote(listening) for holder in sync.holders().values()])
    say("ports", found)
    assert found[0] & {*range(PORTS[0], PORTS[1] + 1)}  # rank 0 serves the rendezvous
    ranges = PORTS, KERNELS_PORTS, RAYS_PORTS
    allowed = {port for first, last in ranges for port in range(first, last + 1)}
    assert {port for ports in found for port in ports} <= allowed


def broadcast() -> None:
    """A trainer and engines on hosts of their own: the model crosses each link once."""
    with WeightSync(replace(CONFIG, mirrors=0)) as sync:
        trainer = fleet(sync)
        asked = [holder.__ray_call__.remote(namespace) for holder in sync.holders().values()]
        assert len(set(ray.get(asked))) == 3
        check_ports(sync)
        for version in (1, 2):
            before = {name: ask("nbytes", name) for name in OTHERS}
            update(sync, trainer, version, check=False)
            crossed = {name: ask("nbytes", name) - nbytes for name, nbytes in before.items()}
            say(f"version {version}: {NBYTES} bytes, {crossed} crossed")
            assert all(NBYTES <= nbytes < 1.3 * NBYTES for nbytes in crossed.values()), crossed
        update(sync, trainer, 3)


def staged() -> None:
    """Over a slow link, unstaged and staged: engines are paused for a small part of that time."""
    for name in OTHERS:
        ask("rate", name, MBIT_PER_S // 4)  # what it receives
    paused = {}
    for stage in ("none", "host"):
        with WeightSync(replace(CONFIG, mirrors=0, stage=stage)) as sync:
            trainer = fleet(sync)
            update(sync, trainer, 1)
            before = {name: ask("nbytes", name) for name in OTHERS}
            phases = update(sync, trainer, 2, check=False).phases
            crossed = {name: ask("nbytes", name) - nbytes for name, nbytes in before.items()}
            paused[stage] = sum(phases[each] for each in ("pause", "move", "verify", "commit"))
            say(f"stage {stage}: {dict(phases)}, paused {paused[stage]:.3f} s, {crossed} crossed")
            assert all(NBYTES <= nbytes < 1.3 * NBYTES for nbytes in crossed.values()), crossed
            update(sync, trainer, 3)
    assert paused["host"] < paused["none"] / 4, paused


def reach(endpoint: tuple[str, int]) -> Callable[[object], bool]:
    """Return what an actor does to tell whether it reaches an endpoint."""

    def work(_: object) -> bool:
        try:
            with contextlib.closing(socket.create_connection(endpoint, patient(0.5))):
                return True
        except OSError:
            return False

    return work


def listen(address: str) -> Callable[[object], int]:
    """Return what an actor does to listen on an address. Its answer is the port."""

    def work(actor: Any) -> int:
        listener = socket.create_server((address, 0))
        actor.listeners = [*getattr(actor, "listeners", []), listener]  # they listen as long as it lives
        return int(listener.getsockname()[1])

    return work


def two_addresses() -> None:
    """West sees east at another address than the head does: connecting names both hosts, and the address."""
    for name in OTHERS:
        ask("address", name)
    ask("cut", "west/east", FOREVER_S)
    config = replace(CONFIG, mirrors=0, connect_timeout_s=patient(5))
    with WeightSync(config) as sync:
        trainer, engines = members(sync)
        near, far = f"{SUBNET}3", second_address(f"{SUBNET}3")
        ports = {each: ray.get(engines["east"].__ray_call__.remote(listen(each))) for each in (near, far)}
        seen = {
            (name, address): ray.get(actor.__ray_call__.remote(reach((address, port))))
            for name, actor in (("head", trainer), ("west", engines["west"]))
            for address, port in ports.items()
        }
        assert seen == {
            ("head", near): True,
            ("head", far): False,
            ("west", near): False,
            ("west", far): True,
        }
        try:
            sync.connect()
        except TransportError as error:
            said = str(error)
        else:
            raise AssertionError("it connected")
        say(said)
        assert f"rank 1 at {SUBNET}2 does not reach rank 2 at {near} (timed out)" in said
        assert "the ranks are holder 0, holder 1, holder 2" in said
        ask("mend", "west/east")
        sync.connect()
        update(sync, trainer, 1)


def examined(*options: str) -> tuple[int, str]:
    """Run the command for a cluster. Returns its exit code and what it printed."""
    command = [sys.executable, "-m", "weightsync.recipes.cli", "doctor", "--cluster", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    say(f"$ weightsync doctor --cluster {' '.join(options)}\n{done.stdout}{done.stderr}")
    return done.returncode, done.stdout


def doctor() -> None:
    """Examine three hosts: with a slow link, without a route between two, and with a link that is cut."""
    options = [
        "--address",
        f"{HEAD}:6379",
        "--ports",
        f"{PORTS[0]}-{PORTS[1]}",
        "--timeout",
        f"{patient(5):g}",
    ]
    code, said = examined(*options)
    assert (code, "problem" in said) == (0, False)
    ask("rate", "east", MBIT_PER_S)  # what it receives
    code, said = examined(*options, "--json")
    rates = {(names(pair)): pair["gb_per_s"] * 8000 for pair in json.loads(said)["pairs"]}
    assert code == 0
    assert len(rates) == 6
    for (_, receiver), mbit_per_s in rates.items():
        if receiver == "east":
            assert MBIT_PER_S / 2 < mbit_per_s < MBIT_PER_S * 2, rates
        else:
            assert mbit_per_s > MBIT_PER_S * 2, rates

    ask("unroute", "west", "east")
    code, said = examined(*options, "--json")
    found = json.loads(said)
    assert code == 1
    assert {names(pair) for pair in found["pairs"] if pair["problem"]} == {("west", "east"), ("east", "west")}
    (at,) = {pair["endpoint"] for pair in found["pairs"] if names(pair) == ("west", "east")}
    assert any(f"does not reach east (10.77.0.3) at {at}" in each for each in found["problems"]), found
    assert len(found["problems"]) == 2

    ask("cut", "west", 600)
    code, said = examined(*options, "--json")
    found = json.loads(said)
    assert code == 1
    assert ["no answer" in each and "from west (10.77.0.2)" in each for each in found["problems"]] == [True]
    assert {names(pair) for pair in found["pairs"]} == {("head", "east"), ("east", "head")}


def names(pair: Mapping[str, str]) -> tuple[str, str]:
    """Return the hostnames of a pair."""
    return pair["sender"].partition(" ")[0], pair["receiver"].partition(" ")[0]


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        broadcast,
        staged,
        doctor,
        two_addresses,
        direct.direct,
        live_sources.live_sources,
        encrypted.encrypted,
        host_copies.host_copies,
        lost_links.lost_links,
        lost_links.hasty_ray,
        quickstart_loop.quickstart_loop,
        servers.servers,
        deltas.deltas,
    )
}
WITHOUT_RAY = (doctor, quickstart_loop.quickstart_loop)
"""These start drivers of their own."""


def main(name: str, head: str) -> None:
    if SCENARIOS[name] in WITHOUT_RAY:
        SCENARIOS[name]()
        return
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(address=f"{head}:6379", log_to_driver=False, runtime_env={"env_vars": env})
    try:
        SCENARIOS[name]()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
