"""Starts the holders' processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Coroutine, Sequence
from types import MappingProxyType
from typing import Any

import torch
from ray.actor import ActorHandle

from weightsync.actors.holders.detached import detached
from weightsync.actors.ray.actor_class import actor_class
from weightsync.actors.ray.placement import Placement, threaded
from weightsync.actors.ray.publish_notices import HolderNode, Told
from weightsync.actors.ray.publish_relay import TrainerActors, publish_all
from weightsync.config import SyncConfig
from weightsync.errors import TransportError
from weightsync.holder.holder import Holder
from weightsync.memory import cuda
from weightsync.memory.kernels.device_kernels import load_copies, load_for_16_bits
from weightsync.memory.tensors import device_id
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.messages import PublishTask
from weightsync.transports import transport_class

# watch() takes a thread of Ray's. Most other calls come by the node.
_NUM_THREADS = 12


def spawn_holder(
    name: str, placement: Placement, transport: str, config: SyncConfig, outlives_as: str = ""
) -> ActorHandle[WeightHolder]:
    """Start a WeightHolder actor on the host of `placement`.

    The actor reserves no CPU or GPU, and only sees the placement's GPU.

    The actor ends with the driver. With `outlives_as`, a name, it is detached and runs until it is killed.

    Ray does not restart the actor: a new process would be empty, so the controller has to know.
    """
    options = process_options(placement.node, placement.gpu if transport == "nccl" else None)
    if outlives_as:
        options |= detached(outlives_as)
    return (
        actor_class(WeightHolder)
        .options(**options)
        .remote(**holder_settings(name, placement, transport, config))
    )


class WeightHolder(Holder):
    """A holder's actor, which also asks trainers of the host for the driver."""

    protocol = HolderNode
    _trainers: TrainerActors = MappingProxyType({})

    def relay(self, trainers: TrainerActors) -> None:
        """Have `trainers` publish when the driver asks."""
        self._trainers = trainers

    def publish_all(
        self, task: PublishTask, tickets: Sequence[int], timeout_s: float
    ) -> Coroutine[object, object, Told]:
        """See `HolderNode`. This is no coroutine function: Ray would run all methods on one loop."""
        return publish_all(self._trainers, task, tickets, timeout_s)


class HolderStandby(WeightHolder):
    """A holder's process that is started ahead of time, with all imports done."""

    def __init__(self, gpu: int | str | None) -> None:
        """Import the modules of holders. `sit` turns the process into a holder.

        `gpu`: the only visible GPU, as an index among Ray's GPUs on this host or as in
        ``CUDA_VISIBLE_DEVICES``; None for none yet.
        """
        self.name = "spare holder"  # Ray asks for the name now
        self._bound_to = ""
        transport_class("gloo" if gpu is None else "nccl")
        if gpu is not None:
            importlib.import_module("weightsync.holder.device_staging")
            with contextlib.suppress(TransportError):  # the holder raises it if it needs NCCL
                cuda.nccl()
            self._bound_to = _see(gpu)

    def bound_to(self) -> str:
        """Return the GPU, ``cuda:<UUID>``, ``cpu`` if CUDA did not start, or empty if unbound."""
        return self._bound_to

    def expect(self, device: str) -> None:
        """Create the CUDA context, and load kernels, if `device` is this standby's GPU.

        All but one load on a thread: the standby can become a holder before they are there.
        """
        if device == self._bound_to:
            torch.cuda.current_stream().query()
            with contextlib.suppress(TransportError):
                load_copies()
                on_daemon(load_for_16_bits, "weightsync-kernels")

    def sit(self, name: str, placement: Placement, transport: str, config: SyncConfig) -> None:
        """Become the holder `name` at `placement`."""
        os.environ["CUDA_VISIBLE_DEVICES"] = placement.gpu if transport == "nccl" else ""
        super().__init__(**holder_settings(name, placement, transport, config))
        for log in (sys.stdout, sys.stderr):  # as Ray writes when an actor starts: logs are known by it
            log.write(f":actor_name:{self!r}\n")
            log.flush()


def _see(gpu: int | str) -> str:
    """Start CUDA only on GPU `gpu`, without using GPU memory.

    CUDA starts in one process of a host at a time. Started later, it would delay engines that connect.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if isinstance(gpu, int) and shown is not None:
            gpu = shown.split(",")[gpu]
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        return device_id(torch.device("cuda", 0))
    except (AssertionError, IndexError, RuntimeError):  # a PyTorch or a process without it
        return "cpu"


def spawn_standby(node: str, gpu: int | str | None) -> ActorHandle[HolderStandby]:
    """Start a `HolderStandby` actor on host `node`. The actor ends with the driver."""
    return (
        actor_class(HolderStandby).options(**process_options(node, "" if gpu is None else None)).remote(gpu)
    )


def holder_settings(name: str, placement: Placement, transport: str, config: SyncConfig) -> dict[str, Any]:
    """Return the arguments of `Holder`."""
    device = placement.device if transport == "nccl" else ""
    return {
        "name": name,
        "host": placement.address,
        "transport": transport,
        "device": device,
        "ports": config.ports,
        "tls": config.tls_files,
    }


def process_options(node: str, gpu: str | None, num_threads: int = _NUM_THREADS) -> dict[str, Any]:
    """Return Ray's options of a process with holders, for `num_threads` calls at the same time.

    `gpu`: the value of ``CUDA_VISIBLE_DEVICES``; None leaves Ray's value.
    """
    visible = {} if gpu is None else {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": gpu}}}
    return visible | threaded(node, num_threads)
