"""Ray for the benchmarks: one actor process per role, on a given GPU."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["free_port", "gpu_uuids", "kill", "ray_nodes", "spawn", "start_ray"]

_PASSED_ON = ("NCCL_", "VLLM_", "CUDA_", "HF_", "WEIGHTSYNC_")


def gpu_uuids() -> list[str]:
    """Return the UUIDs of this host's GPUs for CUDA_VISIBLE_DEVICES; empty without GPUs."""
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()


def start_ray(num_gpus: int) -> None:
    """Start Ray. Actors find this repository and the folders of our PYTHONPATH."""
    ray.init(**_environment(), address="local", **_node(num_gpus))


@contextmanager
def ray_nodes(num_gpus: int, num_nodes: int) -> Iterator[list[str]]:
    """Run Ray with several nodes on this host, with different addresses. Yields the nodes' ids.

    The nodes are hosts to us, which do not map each other's memory.
    """
    environment, node = _environment(), _node(num_gpus)
    environment["runtime_env"]["worker_process_setup_hook"] = "benchmarks.no_mapping.use_sockets"
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        others = [{"node_ip_address": f"127.0.0.{number}", **node} for number in range(2, num_nodes + 1)]
        nodes = [cluster.head_node, *(cluster.add_node(**each) for each in others)]
        ray.init(**environment, address=cluster.address)
        yield [each.node_id for each in nodes]
    finally:
        ray.shutdown()
        cluster.shutdown()


def _node(num_gpus: int) -> dict[str, Any]:
    return {
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_gpus": num_gpus,
        "object_store_memory": 512 << 20,
        "include_dashboard": False,
    }


def _environment() -> dict[str, Any]:
    """Set this process's environment. Returns Ray's options for the actors' environment."""
    # Memory of some virtual machines grows as it is touched. Ray would end actors for lack of memory.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 (Ray spells it so)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    kept.pop("CUDA_VISIBLE_DEVICES", None)
    return {
        "log_to_driver": bool(os.environ.get("WEIGHTSYNC_BENCH_LOGS")),
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **kept}},
    }


def spawn(
    cls: type,
    *args: object,
    gpu: str | None = None,
    num_threads: int = 8,
    env: dict[str, str] | None = None,
    node: str | None = None,
) -> ActorHandle[Any]:
    """Start an actor that only sees `gpu`, or no GPU, on a Ray `node`.

    Actors share GPUs in given pairs, so GPUs are set directly, without Ray's own assignment.
    """
    variables = {
        "CUDA_VISIBLE_DEVICES": gpu or "",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": str(num_threads),
        **(env or {}),
    }
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
    if node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(cls).options(**options).remote(*args)


def kill(actors: Sequence[ActorHandle[Any]]) -> None:
    """End actors without waiting."""
    for actor in actors:
        ray.kill(actor)


def free_port() -> int:
    """Return a TCP port that was just free, like the next port."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
