"""A trainer's node: it is asked before `publish`, and says during `publish` that weights may be read."""

from __future__ import annotations

import asyncio
import secrets
from typing import Protocol

from weightsync.node.codec import decode, encode
from weightsync.node.messages import Notice
from weightsync.protocol.messages import PublishReport, PublishTask


class TrainerNode(Protocol):
    """The calls that a trainer's node answers. Ray makes all others, after calls that users submitted before.

    `readable` returns whether holders may read the weights already. `publish_in_place`, called only then,
    publishes. Both take the ticket of the `publish` that they are part of.
    """

    async def readable(self, ticket: int) -> bool: ...
    async def publish_in_place(self, task: PublishTask, ticket: int) -> PublishReport: ...


def readable(ticket: int) -> Notice:
    """Return the notice that the weights of `publish` number `ticket` may be read."""
    return Notice(ticket)


def published(ticket: int, report: PublishReport) -> Notice:
    """Return the notice of what `publish` number `ticket` returns. Ray's answer takes longer."""
    return Notice(ticket, encode(report, PublishReport))


class PublishNotices:
    """The notices of one trainer rank while it publishes, and the report."""

    def __init__(self) -> None:
        self._ticket = 0
        self._readable: asyncio.Future[None] | None = None
        self._report: asyncio.Future[PublishReport] | None = None

    def expect(
        self, readable: asyncio.Future[None], report: asyncio.Future[PublishReport] | None = None
    ) -> int:
        """Resolve these with the next notices. Returns the ticket that the notices have to carry."""
        # Never one of an earlier connection or driver: the trainer publishes once for each ticket.
        self._ticket, self._readable, self._report = secrets.randbits(62) + 1, readable, report
        return self._ticket

    def came(self, notice: Notice) -> None:
        """Handle a notice. Ignores tickets of abandoned `publish` calls.

        Raises WireError if the report cannot be decoded.
        """
        if notice.number != self._ticket:
            return
        if notice.value:
            if self._report and not self._report.done():
                self._report.set_result(decode(notice.value, PublishReport))
        elif self._readable and not self._readable.done():
            self._readable.set_result(None)
