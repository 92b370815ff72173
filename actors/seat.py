"""Where an actor sits: which host, and which GPU or CPU slot of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from weightsync.errors import ConfigError
from weightsync.memory.tensors import device_id

__all__ = ["Seat", "Seating", "seat_everybody"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Actors with an equal seat share one holder.

    Attributes:
        node: Ray's node id.
        address: the host's address as its peers reach it.
        device: ``cuda:<UUID>``, or ``slot:<name>`` on a CPU.
        pid: the process.
    """

    node: str
    address: str
    device: str
    pid: int

    @classmethod
    def here(cls, slot: str | None = None) -> Seat:
        """This process's seat; without a GPU and a `slot`, a seat that nobody shares."""
        context = ray.get_runtime_context()
        device = f"slot:{slot}" if slot is not None else _gpu() or f"slot:pid-{os.getpid()}"
        return cls(context.get_node_id(), ray.util.get_node_ip_address(), device, os.getpid())

    @property
    def gpu(self) -> str:
        """The GPU as ``CUDA_VISIBLE_DEVICES`` names it, or nothing for a slot."""
        kind, _, uuid = self.device.partition(":")
        return f"GPU-{uuid}" if kind == "cuda" else ""

    @property
    def key(self) -> tuple[str, str]:
        """What two actors on the same device have in common."""
        return self.node, self.device


@dataclass(frozen=True, slots=True)
class Seating:
    """One seat per holder, and the holders of each named trainer rank or engine."""

    seats: tuple[Seat, ...]
    holder_of: Mapping[str, tuple[int, ...]]


def seat_everybody(trainers: Mapping[str, Seat], engines: Mapping[str, Sequence[Seat]]) -> Seating:
    """One holder per seat, shared by the trainer rank and the engine rank that sit there.

    Raises ConfigError when two trainer ranks, or two engine ranks, claim one seat.
    """
    seats: dict[tuple[str, str], Seat] = {}
    holder_of: dict[str, tuple[int, ...]] = {}
    for side in ({name: [seat] for name, seat in trainers.items()}, engines):
        taken: dict[tuple[str, str], str] = {}
        for name, ranks in side.items():
            for seat in ranks:
                if seat.key in taken:
                    raise ConfigError(
                        name, seat.device, f"{taken[seat.key]} has it: give each a device of its own"
                    )
                taken[seat.key] = name
                seats.setdefault(seat.key, seat)
            order = list(seats)
            holder_of[name] = tuple(order.index(seat.key) for seat in ranks)
    return Seating(tuple(seats.values()), holder_of)


def _gpu() -> str | None:
    """UUIDs, because an index means another GPU in each process."""
    import torch

    if not torch.cuda.is_available():
        return None
    return device_id(torch.device("cuda", torch.cuda.current_device()))
