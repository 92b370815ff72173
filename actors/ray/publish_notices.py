"""The nodes of trainers, and of holders that ask trainers, and the notices that weights may be read."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from weightsync.channel.wire import SentError
from weightsync.node.codec import decode, encode
from weightsync.node.messages import Notice
from weightsync.protocol.messages import PublishReport, PublishTask
from weightsync.protocol.peers import HolderPeer

Told: TypeAlias = tuple[dict[int, PublishReport], dict[int, SentError]]
"""Reports and errors, by rank."""


class TrainerNode(Protocol):
    """The calls that a trainer's node answers. Ray makes all others, after calls that users submitted before.

    `readable` returns whether holders may read the weights already. `publish_in_place`, called only then,
    publishes. Both take the ticket of the `publish` that they are part of.
    """

    async def readable(self, ticket: int) -> bool: ...
    async def publish_in_place(self, task: PublishTask, ticket: int) -> PublishReport: ...


class HolderNode(HolderPeer, Protocol):
    """The calls that a holder's node answers. `publish_all` calls `publish` of all trainers on the same host.

    It returns reports and errors by rank, in at most `timeout_s` seconds.
    """

    async def publish_all(self, task: PublishTask, tickets: tuple[int, ...], timeout_s: float) -> Told: ...


def readable(ticket: int) -> Notice:
    """Return the notice that the weights of `publish` number `ticket` may be read."""
    return Notice(ticket)


def published(ticket: int, report: PublishReport) -> Notice:
    """Return the notice of what `publish` number `ticket` returns. Ray's answer takes longer."""
    return Notice(ticket, encode(report, PublishReport))


@dataclass(frozen=True, slots=True, eq=False)
class PublishNotices:
    """The notices of a trainer rank during one `publish`, which resolve `readable` and `report`.

    Attributes:
        ticket: the number of the notices. The trainer publishes once for each ticket, also for later drivers.
    """

    readable: asyncio.Future[None]
    report: asyncio.Future[PublishReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ticket: int = field(default_factory=lambda: secrets.randbits(62) + 1)

    def came(self, notice: Notice) -> None:
        """Handle a notice. Ignores tickets of abandoned `publish` calls.

        Raises WireError if the report cannot be decoded.
        """
        if notice.number != self.ticket:
            return
        if notice.value and not self.report.done():
            self.report.set_result(decode(notice.value, PublishReport))
        elif not notice.value and not self.readable.done():
            self.readable.set_result(None)
