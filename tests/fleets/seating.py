"""Where a recipe's actors are put on a cluster with four GPUs; they are only counted, so none is needed.

python -m tests.fleets.seating
"""

from __future__ import annotations

import os
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tests.patience import patient
from weightsync.actors.holders.detached import NAMESPACE
from weightsync.recipes.config.recipe import EngineSpec, Recipe, TrainerSpec
from weightsync.recipes.fleet.launcher import Launcher

ENGINES = {"wide": EngineSpec(kind="vllm", tensor_parallel_size=2), "narrow": EngineSpec(kind="torch")}
TRAINERS = TrainerSpec(count=2)
NOWHERE = Path("nowhere")


def seen(recipe: Recipe, launcher: Launcher) -> dict[str, str]:
    """What CUDA_VISIBLE_DEVICES says to each of the recipe's actors, if it gets its place."""
    visible = ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    options = {process: launcher.options(process) for process in recipe.devices}
    for each in options.values():
        each.pop("max_restarts")  # of actors only; all of them at once, each with its share
    asked = {process: visible.options(**each).remote() for process, each in options.items()}
    return {process: ray.get(answer, timeout=patient(60)) for process, answer in asked.items()}


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 4, "include_dashboard": False}
    )
    try:
        for _ in range(2):  # the second driver finds what the first has left
            ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
            resumed = Recipe(name="resumed", engines={"main": EngineSpec(kind="torch", count=2)}, resume=True)
            left = Launcher(resumed, NOWHERE)
            assert str(left) == "2 GPUs"
            assert ray.available_resources().get("GPU", 0) == 2, ray.available_resources()
            ray.shutdown()
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
        Launcher(resumed, NOWHERE).close()
        shared = Recipe(name="shared", engines=ENGINES, trainers=TRAINERS)
        launcher = Launcher(shared, NOWHERE)
        where = seen(shared, launcher)
        assert where["engine wide-0"] == f"{where['trainer 0']},{where['trainer 1']}", where
        assert len({where[process] for process in ("trainer 0", "trainer 1", "engine narrow-0")}) == 3, where
        launcher.close()
        apart = Recipe(name="apart", engines=ENGINES, trainers=TRAINERS, placement="disaggregated")
        launcher = Launcher(apart, NOWHERE)
        assert str(launcher) == "CPUs (5 GPUs wanted, 4 there)"
        assert set(seen(apart, launcher).values()) == {""}
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
