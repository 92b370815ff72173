"""What a holder has ready for one membership epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightsync.feed import FeedTicket
from weightsync.memory import BufferHandle

__all__ = ["Group", "Prepared"]

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
