"""Starting the holders' processes."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.detached import detached
from actors.seat import Seat
from weightsync.holder import Holder

__all__ = ["spawn_holder"]

# One each for watch(), a move or refill, keep() and mirror(); the others are for what may come meanwhile.
_NUM_THREADS = 8


def spawn_holder(name: str, seat: Seat, transport: str, outlives_as: str = "") -> ActorHandle[Holder]:
    """A WeightHolder actor on the seat's host; it reserves no CPU and no GPU, and sees the seat's only.

    It ends with its driver, or, if it `outlives_as` an actor of that name, when it is killed.

    It is not restarted by Ray: a new process would hold nothing, so the controller has to know.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": _NUM_THREADS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(seat.node, soft=False),
    }
    if transport == "nccl":
        options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": seat.gpu}}
    if outlives_as:
        options |= detached(outlives_as)
    device = seat.device if transport == "nccl" else ""
    return ray.remote(Holder).options(**options).remote(name, seat.address, transport, device)
