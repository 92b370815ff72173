"""The placement of an actor: the host, and the GPU or CPU slot."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightsync.actors.ray.versions import REMEDY, by_version, own_versions
from weightsync.errors import ConfigError, PlanError, StateError
from weightsync.memory.tensors import device_id

logger = logging.getLogger("weightsync.actors")


@dataclass(frozen=True, slots=True)
class Placement:
    """The host and device of an actor.

    Actors on the same GPU or slot share one holder.

    Attributes:
        node: Ray's node id; the host's id for a process that Ray did not start.
        address: the host's address as peers reach it.
        device: ``cuda:<UUID>`` as `device_id` returns it, or ``slot:<name>`` on a CPU.
        pid: the id of the process.
        versions: the process's versions of weightsync, torch and NCCL, as `own_versions` returns them.
        run: equal in the ranks of one run of a script that joins, see `check_runs`.
    """

    node: str
    address: str
    device: str
    pid: int
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    run: str = ""

    @classmethod
    def here(cls, slot: str | None = None) -> Placement:
        """Return where this process runs."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return cls(context.get_node_id(), address, own_device(slot), os.getpid(), own_versions())

    @classmethod
    def so_far(cls, slot: str | None = None) -> Placement | None:
        """Return `here`, or None if this process may still choose a GPU: asking would start CUDA."""
        import torch

        is_chosen = slot is not None or torch.version.cuda is None or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls.here(slot) if is_chosen else None

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
    """Assign one holder to each GPU or slot, for the trainer and engine ranks there.

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


def check_runs(trainers: Mapping[str, Placement]) -> None:
    """Raise StateError if trainer ranks, by name, are of two runs of a script: each has a part of its model.

    A rank of an earlier run keeps the place until the rank's process ends.
    """
    found = {each.run: f"{name} (process {each.pid} on {each.address})" for name, each in trainers.items()}
    if len(found) > 1:
        first, second, *_ = found.values()
        raise StateError(f"{first} and {second} are of two runs of a script: end the earlier run's processes")


def check_versions(ranks: Mapping[str, Sequence[Placement]]) -> None:
    """Compare versions of weightsync, torch and NCCL between processes on different hosts.

    `ranks`: the placements of each trainer or engine, by name. NCCL counts only where all are on GPUs. Raises
    PlanError for weightsync, and logs the others: a trainer and an engine may have environments of their own,
    and holders that cannot work together say so later. Both name a process and a host of each version.
    """
    placed = [(name, placement) for name, its in ranks.items() for placement in its]
    if len({placement.node for _, placement in placed}) < 2:
        return
    on_gpus = choose_transport("auto", [placement.device for _, placement in placed]) == "nccl"
    for library in ("weightsync", "torch", *(["nccl"] if on_gpus else [])):
        hosts = ((f"{name} on host {each.address}", each.versions) for name, each in placed)
        first, *others = by_version(library, hosts).items() or [("", [""])]
        if others:
            name = others[0][1][0]
            problem = f"it has {library} {others[0][0]}, and {first[1][0]} has {first[0]}: {REMEDY}"
            if library == "weightsync":
                raise PlanError(name, problem)
            logger.warning("[driver] %s: %s", name, problem)


def choose_transport(wanted: str, devices: Sequence[str]) -> str:
    """Return the transport of holders on `devices`, ``nccl`` or ``gloo``. `wanted` may be ``auto``.

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


def own_device(slot: str | None) -> str:
    """Return this process's device. Without a GPU and a `slot`, no other process shares it."""
    return f"slot:{slot}" if slot is not None else _gpu() or f"slot:pid-{os.getpid()}"


def _gpu() -> str | None:
    """The current GPU's UUID, as indices differ between processes."""
    import torch

    if not torch.cuda.is_available():
        return None
    return device_id(torch.device("cuda", torch.cuda.current_device()))
