"""Starting the holders' processes."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.detached import detached
from weightsync.actors.placement import Placement
from weightsync.errors import TransportError
from weightsync.holder.holder import Holder
from weightsync.memory import cuda
from weightsync.memory.tensors import device_id

__all__ = ["Standby", "spawn_holder", "spawn_standby"]

# One each for watch(), a move or refill, keep() and mirror(); the others are for what may come meanwhile.
_NUM_THREADS = 8


def spawn_holder(
    name: str, placement: Placement, transport: str, outlives_as: str = ""
) -> ActorHandle[Holder]:
    """Start a WeightHolder on the host of `placement`. It reserves no CPU or GPU, and sees that GPU alone.

    It ends with its driver, or, if it `outlives_as` an actor of that name, when it is killed.

    It is not restarted by Ray: a new process would hold nothing, so the controller has to know.
    """
    options = _options(placement.node, placement.gpu if transport == "nccl" else None)
    if outlives_as:
        options |= detached(outlives_as)
    return ray.remote(Holder).options(**options).remote(*_place(name, placement, transport))


class Standby(Holder):
    """A holder's process that is started before its GPU is known; its imports are done by then."""

    def __init__(self, gpu: int | None) -> None:
        """It is no holder before `sit`. `gpu`: the one of Ray's on this host that it sees from now on."""
        self.name = "spare holder"  # Ray asks for it now
        self._bound_to = ""
        if gpu is not None:
            importlib.import_module("weightsync.holder.device_staging")
            with contextlib.suppress(TransportError):  # the holder says so, if it needs it
                cuda.nccl()
            self._bound_to = _see(gpu)

    def bound_to(self) -> str:
        """The only GPU that it can use, ``cuda:<UUID>``, or ``cpu`` for none; empty if it is still free."""
        return self._bound_to

    def expect(self, device: str) -> None:
        """An engine rank has started there: what a holder of that GPU needs of it first is taken now."""
        if device == self._bound_to:
            torch.cuda.current_stream().query()

    def sit(self, name: str, placement: Placement, transport: str) -> None:
        """Become the holder `name` at `placement`."""
        os.environ["CUDA_VISIBLE_DEVICES"] = placement.gpu if transport == "nccl" else ""
        super().__init__(*_place(name, placement, transport))


def _see(gpu: int) -> str:
    """Start CUDA with that one alone, and take nothing of its memory.

    CUDA starts in one process of a host after the other: engines would wait for it when they connect.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu) if shown is None else shown.split(",")[gpu]
        return device_id(torch.device("cuda", 0))
    except (AssertionError, IndexError, RuntimeError):  # a PyTorch or a process without it
        return "cpu"


def spawn_standby(node: str, gpu: int | None) -> ActorHandle[Standby]:
    """A Spare actor on that host, which ends with its driver. `gpu`: which of those that Ray has there."""
    return ray.remote(Standby).options(**_options(node, "" if gpu is None else None)).remote(gpu)


def _place(name: str, placement: Placement, transport: str) -> tuple[str, str, str, str]:
    return name, placement.address, transport, placement.device if transport == "nccl" else ""


def _options(node: str, gpu: str | None) -> dict[str, Any]:
    """`gpu`: which one it sees; None is those that Ray shows it."""
    visible = {} if gpu is None else {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": gpu}}}
    return visible | {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": _NUM_THREADS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
