"""Where an actor runs: the host, and its GPU or CPU slot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.errors import ConfigError
from weightsync.memory.tensors import device_id


@dataclass(frozen=True, slots=True)
class Placement:
    """The host and device of an actor.

    Actors on the same GPU or slot share one holder.

    Attributes:
        node: Ray's node id.
        address: the host's address as its peers reach it.
        device: ``cuda:<UUID>`` as `device_id` returns it, or ``slot:<name>`` on a CPU.
        pid: the id of the process.
    """

    node: str
    address: str
    device: str
    pid: int

    @classmethod
    def here(cls, slot: str | None = None) -> Placement:
        """Return where this process runs.

        Without a GPU and a `slot`, no other process shares the device.
        """
        context = ray.get_runtime_context()
        device = f"slot:{slot}" if slot is not None else _gpu() or f"slot:pid-{os.getpid()}"
        return cls(context.get_node_id(), ray.util.get_node_ip_address(), device, os.getpid())

    @property
    def gpu(self) -> str:
        """The GPU as ``CUDA_VISIBLE_DEVICES`` names it, empty for a slot."""
        kind, _, uuid = self.device.partition(":")
        if kind != "cuda":
            return ""
        return uuid if uuid.startswith("MIG-") else f"GPU-{uuid}"

    @property
    def key(self) -> tuple[str, str]:
        """Node and device, equal for actors that share a holder."""
        return self.node, self.device


@dataclass(frozen=True, slots=True)
class Placements:
    """One placement per holder, and the holders of each named trainer rank or engine."""

    placements: tuple[Placement, ...]
    holder_of: Mapping[str, tuple[int, ...]]


def place_ranks(trainers: Mapping[str, Placement], engines: Mapping[str, Sequence[Placement]]) -> Placements:
    """Assign one holder to each GPU or slot, for its trainer and engine ranks.

    Raises ConfigError if two trainer ranks, or two engine ranks, claim the same device.
    """
    placements: dict[tuple[str, str], Placement] = {}
    holder_of: dict[str, tuple[int, ...]] = {}
    for side in ({name: [placement] for name, placement in trainers.items()}, engines):
        taken: dict[tuple[str, str], str] = {}
        for name, ranks in side.items():
            for placement in ranks:
                if placement.key in taken:
                    raise ConfigError(
                        name,
                        placement.device,
                        f"{taken[placement.key]} has it: give each a device of its own",
                    )
                taken[placement.key] = name
                placements.setdefault(placement.key, placement)
            order = list(placements)
            holder_of[name] = tuple(order.index(placement.key) for placement in ranks)
    return Placements(tuple(placements.values()), holder_of)


def choose_transport(wanted: str, devices: Sequence[str]) -> str:
    """Return ``nccl`` or ``gloo``: what holders on `devices` broadcast with. `wanted` may be ``auto``.

    Raises ConfigError for ``nccl`` if a device is no GPU.
    """
    slots = [device for device in devices if not device.startswith("cuda:")]
    if wanted == "nccl" and slots:
        raise ConfigError("sync.transport", "nccl", f"{slots[0]} has no GPU: give auto")
    if wanted != "auto":
        return wanted
    return "gloo" if slots else "nccl"


def threaded(node: str, num_threads: int) -> dict[str, Any]:
    """Return Ray's options for an actor with threads on host `node` that reserves nothing."""
    return {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": num_threads,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }


def _gpu() -> str | None:
    """The current GPU's UUID, as indices differ between processes."""
    import torch

    if not torch.cuda.is_available():
        return None
    return device_id(torch.device("cuda", torch.cuda.current_device()))
