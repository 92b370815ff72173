"""Three hosts, on one: python -m tests.actors.nodes. Fails if losing two of them is not survived."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from tests.actors.fleet import Engine, Trainer
from weightsync import SyncConfig, WeightSync

WIDTH = 64
SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 3,
}
Weights = Mapping[str, torch.Tensor]


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"head": 1}, "_system_config": SOON},
    )
    hosts = {name: cluster.add_node(num_cpus=1, resources={name: 1}) for name in ("east", "west")}
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": env})
    config = SyncConfig(
        bucket_bytes=4096, timeout_s=5, heartbeat_s=2.0, heal_backoff_s=0.1, mirrors=1, refill="zeromq"
    )
    try:
        with WeightSync(config) as sync:
            run(sync, lambda name: cluster.remove_node(hosts[name], allow_graceful=False))
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(sync: WeightSync, lose: Callable[[str], None]) -> None:
    trainer = put("west", Trainer, "t")
    engines = {"near": put("head", Engine, "near", "a"), "far": put("east", Engine, "far", "b")}
    sync.register_trainers([trainer])
    sync.register_engines(engines, respawn=lambda name: put("head", Engine, name, f"again-{name}"))
    sync.connect()
    published = update(sync, trainer, 1)

    lose("east")  # an engine, with its holder
    healed(sync, 1)
    assert sync.heals[-1].version == 1
    assert set(sync.heals[-1].ways.values()) == {"zeromq"}
    check(sync, published)
    published = update(sync, trainer, 2)

    lose("west")  # the trainer, with its holder: what is left of version 2 is the mirror
    ray.kill(sync._members.engines["near"])
    healed(sync, 2)
    assert sync.heals[-1].version == 2
    assert [*sync.heals[-1].bytes_from] == ["holder 1"]
    check(sync, published)

    trainer = put("head", Trainer, "t")
    sync.register_trainers([trainer])
    update(sync, trainer, 3)


def put(node: str, cls: type, *args: object) -> Any:
    options = ray.remote(cls).options(num_cpus=0, max_restarts=0, resources={node: 0.001})
    return options.remote(WIDTH, *args)


def update(sync: WeightSync, trainer: Any, version: int) -> Weights:
    ray.get(trainer.train.remote(version))
    published: Weights = ray.get(trainer.weights.remote())
    report = sync.update_weights(version)
    assert report.engines == {"near": version, "far": version}, report
    sync.settle(30)
    check(sync, published)
    return published


def healed(sync: WeightSync, num_heals: int) -> None:
    deadline = time.monotonic() + 60
    while len(sync.heals) < num_heals:
        assert time.monotonic() < deadline, sync.engine_states()
        time.sleep(0.05)
    sync.settle(30)


def check(sync: WeightSync, published: Weights) -> None:
    assert sorted(sync.serving()) == ["far", "near"], sync.engine_states()
    for handle in sync.serving().values():
        found = ray.get(handle.weights.remote())
        assert all(torch.equal(published[name], found[name]) for name in published)


if __name__ == "__main__":
    main()
