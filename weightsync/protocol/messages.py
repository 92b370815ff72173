"""What a holder has ready for one membership epoch, and what an update asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsync.channel.engine_end import FeedTicket
from weightsync.errors import SlowError
from weightsync.memory.host import BufferHandle
from weightsync.protocol.timing import Span

__all__ = ["Group", "Moved", "Prepared", "Way"]

Group = tuple[int, ...]
"""The holders of one communicator, ascending; a holder's rank is its place."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a holder has ready for one membership epoch.

    Attributes:
        plan_digest: as this holder computed it.
        arena: where its trainer rank publishes; None if it serves none, or reads its memory in place.
        ticket: how its engine rank reaches it, if it serves one.
        offers: rendezvous of the communicators whose first rank it is, by their members.
    """

    plan_digest: str
    arena: BufferHandle | None
    ticket: FeedTicket | None
    offers: Mapping[Group, str]


@dataclass(frozen=True, slots=True)
class Way:
    """What one update does on a holder.

    Attributes:
        pulls: its engine rank reads its part out of the trainers' memory.
        broadcasts_all: every bucket is broadcast, since not all engines can do that.
        cast: buckets that such engines take all the same: they have tensors of another dtype there.
        exchanges: it sends or receives what engine ranks need of other hosts.
    """

    pulls: bool = False
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
