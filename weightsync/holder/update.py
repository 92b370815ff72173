"""One update on a holder, from the first byte to the last."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from weightsync import faults
from weightsync.channel.feed import HolderFeed
from weightsync.channel.wire import Cancel, GoingOn, Ready
from weightsync.errors import DeadlineError, EngineError, SlowError, StateError, WeightSyncError
from weightsync.faults import inject
from weightsync.holder.cross_host import ExchangeEnd
from weightsync.holder.staging import Staging
from weightsync.plan import Plan
from weightsync.protocol.messages import Read, Snapshot, UpdateTask
from weightsync.transports import Pending

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging
    from weightsync.holder.direct_copy import DirectCopy
    from weightsync.holder.quantizing_copy import QuantizingCopy
    from weightsync.quantising.quantizing_tables import QuantizingTables

    Direct: TypeAlias = DirectCopy | QuantizingCopy
    """Copies that digest the engine rank's resulting tensors."""

logger = logging.getLogger("weightsync.holder")


def patience(timeout_s: float) -> tuple[float, float]:
    """Return how long one wait for an engine rank may take in a move, and all such waits together.

    Other holders wait a move's time for each bucket. The rest is left for sending the bucket.
    """
    return 0.5 * timeout_s, 0.9 * timeout_s


class BucketConsumer(ABC):
    """The end of a holder's pipeline in one attempt. Goes on without an engine rank that fails.

    Attributes:
        waited_s: seconds spent waiting for the engine rank.
        slow: why the engine rank was given up, if it did not keep up.
    """

    waited_s: float = 0.0
    slow: SlowError | None = None

    @property
    @abstractmethod
    def taking(self) -> bool:
        """Return True if the engine rank takes part and has not been given up."""

    def wait_free(self, bucket: int) -> None:  # noqa: B027 - by default `Staging.fill` waits on the device
        """Wait until the slot that `bucket` goes to may be filled."""

    @abstractmethod
    def offer(self, bucket: int) -> None:
        """Deliver a bucket that is complete in its slot."""

    @abstractmethod
    def finish(self, num_buckets: int, is_all: bool = True, live: Direct | None = None) -> None:
        """Wait until the engine rank has `num_buckets` buckets.

        If they are not all of the plan's (`is_all`), the rank already has the other buckets. `live` digests
        the rank's memory, if this process does so.
        """

    @abstractmethod
    def cancel(self, cause: str) -> None:
        """Tell the engine rank that no more buckets come."""


def open_consumer(
    staging: Staging,
    feed: HolderFeed | None,
    attempt: int,
    num_slots: int,
    timeout_s: float,
    limit_s: float,
    snapshot: Snapshot | None = None,
    only: frozenset[int] | None = None,
) -> BucketConsumer:
    """Return the consumer for the engine rank behind `feed`, in an update or, from `snapshot`, in a refill.

    A `WriteConsumer` if the holder writes the rank's memory, as from a flat snapshot or if it quantises, else
    a `FeedConsumer`. `only`: the buckets to write; None for all. Raises StateError if all other buckets are
    copied directly, and the rank has not allowed the holder to write quantised bytes.
    """
    if (memory := staging.mapped) and feed:
        if only is not None and not memory.writes and not feed.is_writable():
            raise StateError(f"{feed.ticket.engine} has not said that what is quantised may be written to it")
        if memory.writes or only is not None or (snapshot and snapshot.is_flat):
            return WriteConsumer(memory, feed, attempt, limit_s, only)
        if memory.quantizing and feed.is_writable():
            return WriteConsumer(memory, feed, attempt, limit_s, quantizing=memory.quantizing)
    return FeedConsumer(feed, attempt, num_slots, timeout_s, limit_s, whole=snapshot is not None)


class FeedConsumer(BucketConsumer):
    """Lets the engine rank read the slots. Does nothing without a feed, or after the rank's first failure.

    `timeout_s` limits one wait for the engine rank, `limit_s` all of them together; waits for other holders
    do not count. With `whole`, as in a refill, the rank reads everything from the slots.
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
        self._limit_s, self._num_slots = limit_s, num_slots
        self._read = 0

    @property
    def taking(self) -> bool:
        return self._feed is not None

    def wait_free(self, bucket: int) -> None:
        self._wait_read(bucket - self._num_slots + 1)

    def offer(self, bucket: int) -> None:
        if self._feed:
            self._feed.send(Ready(self._attempt, bucket, self._whole))

    def finish(self, num_buckets: int, is_all: bool = True, live: Direct | None = None) -> None:
        self._wait_read(num_buckets)
        if self._feed and not is_all:
            self._feed.written(self._attempt)

    def _wait_read(self, num_buckets: int) -> None:
        while self._feed and self._read < num_buckets:
            begun = time.monotonic()
            try:
                left_s = max(0.0, self._limit_s - self.waited_s)
                self._feed.wait_done(self._attempt, self._read, min(self._timeout_s, left_s))
                self._read += 1
            except DeadlineError as error:
                self.slow = self._slowness(error)
                self._give_up(self.slow)
            except EngineError as error:
                self._give_up(error)
            finally:
                self.waited_s += time.monotonic() - begun

    def _slowness(self, late: DeadlineError) -> SlowError:
        if late.timeout_s >= self._timeout_s:
            return SlowError(late.phase, late.missing, late.timeout_s)
        return SlowError(f"reading of buckets 0 to {self._read}, together", late.missing, self._limit_s)

    def _give_up(self, error: WeightSyncError) -> None:
        if self._feed:
            ticket = self._feed.ticket
            logger.warning("[%s] goes on without engine %s: %s", ticket.holder, ticket.engine, error)
        self.cancel(str(error))
        self._feed = None

    def cancel(self, cause: str) -> None:
        if self._feed:
            self._feed.send(Cancel(self._attempt, cause))


class WriteConsumer(BucketConsumer):
    """Writes buckets, or just those in `only`, into the engine rank's memory if it takes part.

    It never waits for the engine rank.
    """

    def __init__(
        self,
        memory: DeviceStaging,
        feed: HolderFeed | None,
        attempt: int,
        timeout_s: float,
        only: frozenset[int] | None = None,
        quantizing: QuantizingTables | None = None,
    ) -> None:
        """`quantizing`: quantises the buckets, and digests them."""
        self._memory, self._feed, self._only = memory, feed, only
        self._attempt, self._timeout_s, self._quantizing = attempt, timeout_s, quantizing

    @property
    def taking(self) -> bool:
        return self._feed is not None and not self._feed.dropped

    def offer(self, bucket: int) -> None:
        if self.taking and (self._only is None or bucket in self._only):
            self._memory.write(bucket)
        if self._feed and self.taking:
            self._feed.send(GoingOn(self._attempt))

    def finish(self, num_buckets: int, is_all: bool = True, live: Direct | None = None) -> None:
        """Wait until everything is written, then tell the engine rank, with the digests if there are any."""
        self._memory.wait_written(self._timeout_s)
        digests = self._quantizing or live
        if self._feed and self.taking:
            self._feed.written(self._attempt, digests.result() if digests else None)

    def cancel(self, cause: str) -> None:
        if self._feed:
            try:
                self._memory.wait_written(self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the first cause is the one to tell
                logger.warning("what was begun may still be written: %s", error)
            self._feed.send(Cancel(self._attempt, cause))


def run_update(
    plan: Plan,
    task: UpdateTask,
    index: int,
    staging: Staging,
    exchange: ExchangeEnd | None,
    start: Callable[[int], Sequence[Pending]],
    consumer: BucketConsumer,
) -> None:
    """Run holder `index`'s part of an update: direct copies, cross-host exchange, broadcasts.

    `start` queues a bucket's broadcasts; `consumer` gets each bucket that arrived. A `FeedConsumer` needs all
    buckets, a `WriteConsumer` can do with some. Errors pass unchanged.
    """
    reads, live = isinstance(task, Read), None
    writes = reads and consumer.taking
    if writes or task.exchanges:
        inject("move", bucket=0, num_buckets=1)
    if writes:
        assert staging.mapped
        live = staging.mapped.start_direct_copy(task.frozen)
    if task.exchanges:
        assert exchange
        exchange.move(lambda: reads and consumer.taking)
    buckets = task.buckets(plan)
    pump(
        buckets,
        # Selected buckets may share a slot, so the next one starts after the last was offered.
        plan.slots if task.sent is None else 1,
        start,
        (lambda bucket: _inject(plan, bucket, index, staging)) if faults.active else None,
        consumer,
    )
    consumer.finish(len(buckets), is_all=task.frozen, live=live)
    staging.unmap_forgotten()


def _inject(plan: Plan, bucket: int, index: int, staging: Staging) -> None:
    """Inject the faults of holder `index` once a bucket has arrived.

    ``corrupt`` changes a step that came from another root, since the holder's own share must not change at
    its source. Without slots, the holder receives nothing.
    """
    came = [step for step in plan.bucket_steps(bucket) if step.root != index and step.nbytes]
    data = staging.at(came[bucket % len(came)]) if came and staging.slots else None
    inject("move", bucket=bucket, num_buckets=plan.num_buckets, data=data)


def pump(
    buckets: Iterable[int],
    num_ahead: int,
    start: Callable[[int], Sequence[Pending]],
    arrived: Callable[[int], None] | None,
    consumer: BucketConsumer,
) -> None:
    """Start buckets, up to `num_ahead` at once.

    Calls `arrived`, if given, for each bucket, then offers the bucket to `consumer`.
    """
    ahead: deque[tuple[int, Sequence[Pending]]] = deque()

    def hand_over() -> None:
        bucket, started = ahead.popleft()
        for pending in started:
            pending.wait()
        if arrived:
            arrived(bucket)
        consumer.offer(bucket)

    for bucket in buckets:
        consumer.wait_free(bucket)
        ahead.append((bucket, start(bucket)))
        if len(ahead) == num_ahead:
            hand_over()
    while ahead:
        hand_over()
