"""What the driver, holders, trainers and engines tell one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import SlowError
from weightsync.plan.shuffle import ShufflePlan
from weightsync.protocol.handles import BufferHandle, Handle, Offer
from weightsync.protocol.timing import Span

__all__ = [
    "Digests",
    "FeedTicket",
    "Group",
    "Moved",
    "Part",
    "Prepared",
    "Published",
    "Refilled",
    "Samples",
    "Snapshot",
    "SnapshotHeader",
    "SnapshotPart",
    "UpdateTask",
    "combine",
]

Group = tuple[int, ...]
"""The holders of one communicator, ascending; a holder's rank is its place."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a holder has ready for one membership epoch.

    Attributes:
        plan_digest: as this holder computed it.
        send buffer: where its trainer rank publishes; None if it serves none, or reads its memory in place.
        ticket: how its engine rank reaches it, if it serves one.
        offers: the rendezvous of each communicator in which this holder is the first rank, by members.
    """

    plan_digest: str
    send_buffer: BufferHandle | None
    ticket: FeedTicket | None
    offers: Mapping[Group, str]


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """What one update does on a holder.

    Attributes:
        copies_directly: its engine rank reads its part out of the trainers' memory.
        broadcasts_all: every bucket is broadcast, since not all engines can do that.
        cast: buckets that such engines take all the same: they have tensors of another dtype there.
        exchanges: it sends or receives what engine ranks need of other hosts.
    """

    copies_directly: bool = False
    broadcasts_all: bool = True
    cast: frozenset[int] = frozenset()
    exchanges: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """What one update was on a holder.

    Attributes:
        span: when it began and what it took.
        waited_s: the time spent on waiting for its engine rank alone.
        slow: why the engine rank was given up, if it did not keep up.
    """

    span: Span
    waited_s: float = 0.0
    slow: SlowError | None = None


class FeedTicket(msgspec.Struct, frozen=True):
    """What an engine rank needs to reach its holder. Carries the run's secret: do not log it.

    `slots` are the bucket buffers. `send_buffer` is the holder's own share, when it keeps one for trainer
    rank `trainer`: pieces of that trainer are read from it and not from a slot.
    """

    holder: str
    engine: str
    endpoint: str
    secret: bytes
    slots: tuple[Handle, ...]
    send_buffer: BufferHandle | None
    trainer: int

    def __repr__(self) -> str:
        return f"FeedTicket(holder={self.holder!r}, engine={self.engine!r})"


@dataclass(frozen=True, slots=True)
class Part:
    """What one holder has to do with messages.

    Attributes:
        members: the holder of each rank of the communicator.
        rank: this holder's.
        plan: what concerns it.
    """

    members: tuple[int, ...]
    rank: int
    plan: ShufflePlan


class SnapshotHeader(msgspec.Struct, frozen=True):
    """Which part of what, and by which `layout` its bytes lie: see `Snapshot`."""

    version: int
    layout: str
    part: int


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part that is kept, where it can be read, and the digests of the whole version that it is of."""

    header: SnapshotHeader
    offer: Offer
    expected: Digests


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed version, and who keeps each part of it.

    Attributes:
        layout: by which the parts lie: `Plan.content` where each is what one trainer rank published,
            `flat_layout` where each is the `FlatSnapshot` of one engine rank.
        parts: offers by the part's number; the first is of the holder that copied it, mirrors follow.
        is_flat: which of the two.
    """

    version: int
    layout: str
    parts: Mapping[int, Sequence[Offer]]
    is_flat: bool = False

    def of_rank(self, rank: int) -> Snapshot:
        """What rank `rank` of an engine needs of it."""
        if not self.is_flat:
            return self
        part = min(self.parts) + rank
        return replace(self, parts={part: self.parts[part]})


@dataclass(frozen=True, slots=True)
class Refilled:
    """What one rank read: bytes by holder, the way that each was read, and the seconds it took."""

    bytes_from: Mapping[str, int]
    ways: Mapping[str, str]
    seconds: float


Digests = npt.NDArray[np.uint64]
"""One digest per tensor of a plan, in the plan's order: shape ``[num_tensors]``."""


def combine(shares: Sequence[Digests]) -> Digests:
    """Add up what several ranks computed for the same tensors: uint64, wrapping."""
    total: Digests = np.add.reduce(list(shares), axis=0, dtype=np.uint64)
    return total


Samples = Sequence[tuple[float, int]]
"""Seconds since the first look, and the bytes that were in use from then on."""


@dataclass(frozen=True, slots=True)
class Published:
    """Of this rank's share of each tensor of the plan.

    Attributes:
        digests: uint64[num_tensors]; the shares of all ranks add up to the tensor's digest.
        nonfinite: elements that are NaN or Inf, by the tensor's name, of tensors that have any.
    """

    digests: Digests
    nonfinite: Mapping[str, int]
