"""A vLLM whose two ranks are on two hosts of a cluster: python -m tests.fleets.far_ranks FOLDER.

The hosts are nodes of Ray on this machine. The folder is on the path of all processes, with an entry point by
which vLLM takes CPUs for GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from tests.fleets.actors import until
from tests.fleets.foreign_actors import FarRollout, TransformersTrainer
from tests.models import build_tiny_qwen3
from tests.patience import patient
from weightsync import SyncConfig, WeightSync

ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
PROMPT = [5, 9, 3, 7]


def write_entry_point(folder: Path) -> None:
    info = folder / "rayed_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: rayed_cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nrayed_cpu = tests.fleets.rayed_cpu:platform\n"
    )


def node(_: object) -> str:
    return ray.get_runtime_context().get_node_id()


def shut_down(actor: FarRollout) -> None:
    actor.llm.shutdown()


def pid(_: object) -> int:
    return os.getpid()


def main(folder: Path) -> None:
    write_entry_point(folder)
    model = str(folder / "model")
    build_tiny_qwen3(folder / "model")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "resources": {"head": 1}}
    )
    cluster.add_node(num_cpus=1, num_gpus=1)
    # vLLM's core joins a cluster by itself, and this host may have others.
    env = ENV | {"PYTHONPATH": os.environ["PYTHONPATH"], "RAY_ADDRESS": cluster.address}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": env})
    on_head = ray.remote(num_cpus=0, resources={"head": 0.01})
    trainer = on_head(TransformersTrainer).remote(model)

    def start(_: str) -> Any:
        return on_head(FarRollout).remote(model)

    config = SyncConfig(timeout_s=patient(20), connect_timeout_s=patient(120), heartbeat_s=patient(1))
    try:
        with WeightSync(config) as sync:
            sync.register_trainers([trainer], model="actor.model")
            sync.register_engines({"far": start("")}, respawn=start, llm="llm")
            sync.connect()
            holders = ray.get([each.__ray_call__.remote(node) for each in sync.holders().values()])
            assert {*holders} == {each["NodeID"] for each in ray.nodes()}, "one beside each rank"
            for version in (1, 2, 3):
                update(sync, trainer, version)
            engine = sync.engines()["far"]
            os.kill(ray.get(engine.__ray_call__.remote(pid)), signal.SIGKILL)
            assert until(lambda: sync.engines()["far"] != engine, patient(60))
            sync.settle(patient(120))
            check(sync, trainer, 3)
            update(sync, trainer, 4)
            # Otherwise vLLM's core outlives its actor.
            ray.get(sync.engines()["far"].__ray_call__.remote(shut_down))
    finally:
        ray.shutdown()
        cluster.shutdown()


def update(sync: WeightSync, trainer: Any, version: int) -> None:
    ray.get(trainer.complete.remote(PROMPT, 1, version))
    report = sync.update_weights(version)
    assert report.verified
    assert report.engines == {"far": version}, report
    check(sync, trainer, version)


def check(sync: WeightSync, trainer: Any, version: int) -> None:
    wanted = ray.get(trainer.complete.remote(PROMPT, 8, version))
    assert ray.get(sync.serving()["far"].complete.remote(PROMPT, 8)) == wanted


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
