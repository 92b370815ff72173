"""Several hosts, on one: python -m tests.fleets.nodes WHEN. Fails if what it tests does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import save_file

from tests.fleets.actors import Engine, Trainer, until
from tests.fleets.intercept import CALLS, intercept
from tests.patience import patient
from weightsync import SyncConfig, WeightSync
from weightsync.errors import WeightSyncError
from weightsync.faults import Fault, FaultPlan

WIDTH = 64
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 3,
}
LATE = {"health_check_failure_threshold": 1000}
"""With these settings, Ray does not declare a node dead while its process is stopped."""
Weights = Mapping[str, torch.Tensor]


def main(when: str) -> None:
    settings = LATE if when == "deaf" else SOON
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"head": 1}, "_system_config": settings},
    )
    hosts = {name: cluster.add_node(num_cpus=1, resources={name: 1}) for name in ("east", "west")}
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": env})
    config = SyncConfig(
        bucket_bytes=4096,
        timeout_s=patient(5),
        heartbeat_s=patient(2),
        heal_backoff_s=0.1,
        mirrors=1,
        refill="zeromq",
    )
    try:
        with WeightSync(config) as sync:

            def lose(name: str) -> None:
                cluster.remove_node(hosts[name], allow_graceful=False)

            def gain(name: str) -> None:
                hosts[name] = cluster.add_node(num_cpus=1, resources={name: 1})

            if when == "idle":
                idle(sync, lose)
            elif when == "checkpoint":
                checkpoint(sync, [host.node_id for host in hosts.values()])
            elif when == "deaf":
                deaf(sync, hosts["east"].all_processes["raylet"][0].process.pid)
            else:
                phases(sync, gain, lose)
    finally:
        ray.shutdown()
        cluster.shutdown()


def idle(sync: WeightSync, lose: Callable[[str], None]) -> None:
    trainer = put("west", Trainer, "t")
    engines = {"near": put("head", Engine, "near", "a"), "far": put("east", Engine, "far", "b")}
    sync.register_trainers([trainer])
    sync.register_engines(engines, respawn=lambda name: put("head", Engine, name, f"again-{name}"))
    sync.connect()
    published = update(sync, trainer, 1)

    lose("east")  # an engine, with its holder
    respawned(sync, "far", 0)
    assert sync.heals[-1].version == 1
    assert set(sync.heals[-1].ways.values()) == {"zeromq"}
    check(sync, published)
    published = update(sync, trainer, 2)

    lose("west")  # the trainer, with its holder: what is left of version 2 is the mirror
    ray.kill(sync.engines()["near"])
    respawned(sync, "near", 1)
    assert sync.heals[-1].version == 2
    assert [*sync.heals[-1].bytes_from] == ["holder 1"]
    check(sync, published)

    trainer = put("head", Trainer, "t")
    sync.register_trainers([trainer])
    update(sync, trainer, 3)


def deaf(sync: WeightSync, raylet: int) -> None:
    """A host's Ray fetches no objects, while its actors answer: the others go on until it does again."""
    trainer = put("head", Trainer, "t")
    sync.register_trainers([trainer])
    sync.register_engines({"near": put("head", Engine, "near", "a"), "far": put("east", Engine, "far", "b")})
    sync.connect()
    update(sync, trainer, 1)
    os.kill(raylet, signal.SIGSTOP)
    try:
        ray.get(sync.engines()["far"].counts.remote())
        sync.connect()
        ray.get(trainer.train.remote(2))
        assert sync.update_weights(2).engines == {"near": 2, "far": 0}
        assert [*sync.serving()] == ["near"]
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert until(lambda: len(sync.serving()) == 2, patient(60)), sync.engine_states()
    update(sync, trainer, 3)


def checkpoint(sync: WeightSync, nodes: list[str]) -> None:
    """Each of two hosts reads half of the files, and its engine's holder sends it."""
    homes = {"near": "east", "far": "west"}
    sync.register_engines({name: put(home, Engine, name, name) for name, home in homes.items()})
    tensors = {f"{i}.weight": torch.randn(WIDTH if i == 0 else 8, WIDTH) for i in range(2)}
    tensors |= {f"{i}.bias": torch.randn(WIDTH if i == 0 else 8) for i in range(2)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors")
        read = sync.register_checkpoint("a", [folder], nodes=nodes).result()
        assert read.nbytes + read.mapped_nbytes == sum(tensor.nbytes for tensor in tensors.values())
        sync.connect()
        assert set(sync.plan.members.trainers) == {0, 1}
        assert min(sync.plan.explain().sent.values()) > 0
        sync.update_weights(checkpoint="a")
    check(sync, tensors)


def phases(sync: WeightSync, gain: Callable[[str], None], lose: Callable[[str], None]) -> None:
    """In each phase of an update the host of an engine and its holder goes; its next one is elsewhere."""
    slots = (f"slot-{number}" for number in itertools.count())
    trainer = put("head", Trainer, "t")
    sync.register_trainers([trainer])
    engines = {
        "near": put("head", Engine, "near", next(slots)),
        "far": put("east", Engine, "far", next(slots)),
    }
    sync.register_engines(engines, respawn=lambda name: put("head", Engine, name, next(slots)))
    sync.connect()
    update(sync, trainer, 1)
    for phase, method in CALLS.items():
        gain(phase)
        sync.remove_engine("far")
        sync.add_engine("far", put(phase, Engine, "far", next(slots)))
        update(sync, trainer, sync.version + 1)
        num_heals, version = len(sync.heals), sync.version + 1
        if phase == "refill":
            sync.inject(FaultPlan((Fault(process="engine far", action="error", at="move", version=version),)))
        undo = intercept(method, lambda call, name=phase: losing(call, lambda: lose(name)))
        before: Weights = ray.get(trainer.weights.remote())
        ray.get(trainer.train.remote(version))
        published: Weights = ray.get(trainer.weights.remote())
        with contextlib.suppress(WeightSyncError):  # it went on without the lost one, or did not commit
            sync.update_weights(version)
        respawned(sync, "far", num_heals)  # it may have been refilled before it was lost
        undo()
        for handle in sync.serving().values():
            exact(handle, published if sync.version == version else before)
        update(sync, trainer, version + 1)


def losing(work: Callable[..., Any], lose: Callable[[], None]) -> Callable[..., Any]:
    """`work`, begun; the first time a host is lost meanwhile."""
    there = [lose]

    async def both(*args: Any) -> Any:
        begun = asyncio.ensure_future(work(*args))
        await asyncio.wait([begun], timeout=random.uniform(0.0, 0.02))
        if there:
            await asyncio.to_thread(there.pop())
        return await begun

    return both


def put(node: str, cls: type, *args: object) -> Any:
    options = ray.remote(cls).options(num_cpus=0, max_restarts=0, resources={node: 0.001})
    return options.remote(WIDTH, *args)


def update(sync: WeightSync, trainer: Any, version: int) -> Weights:
    ray.get(trainer.train.remote(version))
    published: Weights = ray.get(trainer.weights.remote())
    report = sync.update_weights(version)
    assert report.engines == {"near": version, "far": version}, report
    sync.settle(patient(30))
    check(sync, published)
    return published


def respawned(sync: WeightSync, engine: str, since: int) -> None:
    """A new process of `engine` is what one of the heals after the first `since` brought back."""
    deadline = time.monotonic() + patient(60)
    while not any(heal.engine == engine and heal.respawned_at for heal in sync.heals[since:]):
        assert time.monotonic() < deadline, sync.engine_states()
        time.sleep(0.05)
    sync.settle(patient(30))


def check(sync: WeightSync, published: Weights) -> None:
    assert sorted(sync.serving()) == ["far", "near"], sync.engine_states()
    for handle in sync.serving().values():
        exact(handle, published)


def exact(handle: Any, published: Weights) -> None:
    found = ray.get(handle.weights.remote())
    assert all(torch.equal(published[name], found[name]) for name in published)


if __name__ == "__main__":
    main(sys.argv[1])
