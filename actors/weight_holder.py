"""Starts the holders' processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from ray.actor import ActorHandle

from weightsync.actors.actor_class import actor_class
from weightsync.actors.detached import detached
from weightsync.actors.placement import Placement, threaded
from weightsync.config import Ports
from weightsync.errors import StateError, TransportError
from weightsync.holder.holder import Holder
from weightsync.memory import cuda
from weightsync.memory.kernels import load_copies
from weightsync.memory.tensors import device_id
from weightsync.protocol.daemon import on_daemon
from weightsync.transports import transport_class

T = TypeVar("T")

# watch(), answer_calls(), a refill, snapshot() and replicate() take one each. The rest are for other calls.
_NUM_THREADS = 9
_NUM_CALLS = 1000
"""Calls of all parts of one process that may wait at the same time. They take no threads of Ray's."""


def spawn_holder(
    name: str, placement: Placement, transport: str, ports: Ports | None, outlives_as: str = ""
) -> ActorHandle[Holder]:
    """Start a Holder actor on the host of `placement`.

    It reserves no CPU or GPU, and sees that GPU alone.

    It ends with its driver. With `outlives_as`, a name, it is detached and runs until it is killed.

    Ray does not restart it: a new process would hold nothing, so the controller has to know.
    """
    options = _options(placement.node, placement.gpu if transport == "nccl" else None)
    if outlives_as:
        options |= detached(outlives_as)
    return actor_class(Holder).options(**options).remote(**holder_settings(name, placement, transport, ports))


class HolderParts:
    """A process with several holders: its parts, by number.

    Each call runs on a thread of its own. So parts that wait for their peers keep no other part waiting, here
    or in the peers' processes.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Holder] = {}
        self._changing = asyncio.Lock()

    def __repr__(self) -> str:
        """Return the name with which Ray starts each line of its log."""
        return "holders of adapters"

    async def open_part(self, part: int, settings: Mapping[str, Any]) -> None:
        """Make a holder of `holder_settings`. Raises what `Holder` raises."""
        async with self._changing:
            self._parts[part] = await _on_thread(partial(Holder, **settings))

    async def call_part(self, part: int, method: str, *args: Any) -> Any:  # noqa: ANN401 - as the method
        """Call a method of one holder. Raises StateError if that was closed."""
        if part not in self._parts:
            raise StateError(f"part {part} of the holders of adapters was closed")
        return await _on_thread(partial(getattr(self._parts[part], method), *args))

    async def close_part(self, part: int) -> None:
        """End what one holder does, and free its memory. Safe to call twice."""
        async with self._changing:  # after `open_part`, which may still run
            holder = self._parts.pop(part, None)
        if holder:
            await _on_thread(holder.close)


async def _on_thread(call: Callable[[], T]) -> T:
    return await asyncio.wrap_future(on_daemon(call, "weightsync-part"))


def spawn_parts(placement: Placement, transport: str) -> ActorHandle[HolderParts]:
    """Start a `HolderParts` actor as `spawn_holder` starts a holder's. It ends with its driver."""
    options = _options(placement.node, placement.gpu if transport == "nccl" else None, _NUM_CALLS)
    return actor_class(HolderParts).options(**options).remote()


class HolderStandby(Holder):
    """A holder's process started ahead of time, with its imports done."""

    def __init__(self, gpu: int | str | None) -> None:
        """Import what holders need. It becomes a holder in `sit`.

        `gpu`: the only GPU that it sees, as its index among Ray's GPUs on this host or as
        ``CUDA_VISIBLE_DEVICES`` names it; None for none yet.
        """
        self.name = "spare holder"  # Ray asks for its name now
        self._bound_to = ""
        transport_class("gloo" if gpu is None else "nccl")
        if gpu is not None:
            importlib.import_module("weightsync.holder.device_staging")
            with contextlib.suppress(TransportError):  # the holder raises it if it needs NCCL
                cuda.nccl()
            self._bound_to = _see(gpu)

    def bound_to(self) -> str:
        """Return its GPU, ``cuda:<UUID>``, ``cpu`` if CUDA did not start, or empty if unbound."""
        return self._bound_to

    def expect(self, device: str) -> None:
        """Create the CUDA context, and load a kernel, if `device` is this standby's GPU."""
        if device == self._bound_to:
            torch.cuda.current_stream().query()
            with contextlib.suppress(TransportError):
                load_copies()

    def sit(self, name: str, placement: Placement, transport: str, ports: Ports | None) -> None:
        """Become the holder `name` at `placement`."""
        os.environ["CUDA_VISIBLE_DEVICES"] = placement.gpu if transport == "nccl" else ""
        super().__init__(**holder_settings(name, placement, transport, ports))
        for log in (sys.stdout, sys.stderr):  # as Ray writes when an actor starts: logs are known by it
            log.write(f":actor_name:{self!r}\n")
            log.flush()


def _see(gpu: int | str) -> str:
    """Start CUDA on GPU `gpu` alone, without taking GPU memory.

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
    """Start a `HolderStandby` actor on host `node`. It ends with its driver."""
    return actor_class(HolderStandby).options(**_options(node, "" if gpu is None else None)).remote(gpu)


def holder_settings(name: str, placement: Placement, transport: str, ports: Ports | None) -> dict[str, Any]:
    """Return the arguments of `Holder`."""
    device = placement.device if transport == "nccl" else ""
    return {
        "name": name,
        "host": placement.address,
        "transport": transport,
        "device": device,
        "ports": ports,
    }


def _options(node: str, gpu: str | None, num_threads: int = _NUM_THREADS) -> dict[str, Any]:
    """`gpu`: the value of ``CUDA_VISIBLE_DEVICES``; None leaves what Ray sets."""
    visible = {} if gpu is None else {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": gpu}}}
    return visible | threaded(node, num_threads)
