"""The engine rank's side of a move or a refill, as its holder drives it: buckets go out, in order."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from weightsync.errors import DeadlineError, EngineError
from weightsync.feed import HolderFeed
from weightsync.staging import Staging

__all__ = ["Outlet", "open_outlet"]

logger = logging.getLogger("weightsync.outlet")


class Outlet(Protocol):
    """Where the buckets of one attempt go. An engine rank that fails or falls silent is left behind."""

    @property
    def taking(self) -> bool:
        """Whether the engine rank takes part, and was not given up."""

    def wait_free(self, bucket: int) -> None:
        """Wait until the slot that `bucket` goes to may be filled."""

    def offer(self, bucket: int) -> None:
        """A bucket is complete in its slot."""

    def finish(self, num_buckets: int) -> None:
        """Wait until all `num_buckets` were taken."""

    def cancel(self, cause: str) -> None:
        """No more will come."""


def open_outlet(
    staging: Staging,
    feed: HolderFeed | None,
    feeding: bool,
    attempt: int,
    num_slots: int,
    timeout_s: float,
    limit_s: float,
    whole: bool = False,
    only: frozenset[int] | None = None,
) -> Outlet:
    """To the engine rank behind `feed`, if it takes part; see `Feeding` and `Writing` for the rest."""
    taker = feed if feeding else None
    if staging.writes and feed:
        return Writing(staging, taker, attempt, limit_s, only)
    return Feeding(taker, attempt, num_slots, timeout_s, limit_s, whole)


class Feeding:
    """The engine rank reads the slots; without a feed, or after its first failure, nobody does.

    `timeout_s` is what it may take over a bucket, `limit_s` over all of them. `whole`: see `Ready`.
    """

    def __init__(
        self,
        feed: HolderFeed | None,
        attempt: int,
        num_slots: int,
        timeout_s: float,
        limit_s: float,
        whole: bool = False,
    ) -> None:
        self._feed, self._attempt, self._timeout_s, self._whole = feed, attempt, timeout_s, whole
        self._until = time.monotonic() + limit_s
        self._num_slots = num_slots
        self._read = 0

    @property
    def taking(self) -> bool:
        return self._feed is not None

    def wait_free(self, bucket: int) -> None:
        self.finish(bucket - self._num_slots + 1)

    def offer(self, bucket: int) -> None:
        if self._feed:
            self._feed.offer(self._attempt, bucket, self._whole)

    def finish(self, num_buckets: int) -> None:
        while self._feed and self._read < num_buckets:
            try:
                left = min(self._timeout_s, self._until - time.monotonic())
                self._feed.wait_done(self._attempt, self._read, left)
                self._read += 1
            except (EngineError, DeadlineError) as error:
                logger.warning("going on without an engine: %s", error)
                self.cancel(str(error))
                self._feed = None

    def cancel(self, cause: str) -> None:
        if self._feed:
            self._feed.cancel(self._attempt, cause)


class Writing:
    """The engine rank's memory is written from here, if it takes part; `only` these buckets, if given."""

    def __init__(
        self,
        staging: Staging,
        feed: HolderFeed | None,
        attempt: int,
        timeout_s: float,
        only: frozenset[int] | None = None,
    ) -> None:
        self._staging, self._feed, self._only = staging, feed, only
        self._attempt, self._timeout_s = attempt, timeout_s

    @property
    def taking(self) -> bool:
        return self._feed is not None and not self._feed.dropped

    def wait_free(self, bucket: int) -> None:
        """The filling waits on the device."""

    def offer(self, bucket: int) -> None:
        if self.taking and (self._only is None or bucket in self._only):
            self._staging.write(bucket)

    def finish(self, num_buckets: int) -> None:
        """Wait until everything is written, and say so."""
        self._staging.settle(self._timeout_s)
        if self._feed and self.taking:
            self._feed.written(self._attempt)

    def cancel(self, cause: str) -> None:
        if self._feed:
            try:
                self._staging.settle(self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the first cause is the one to tell
                logger.warning("what was begun may still be written: %s", error)
            self._feed.cancel(self._attempt, cause)
