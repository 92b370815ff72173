"""Refills an engine rank from the holder's page-locked memory, or from the rank's GPU."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weightsync.errors import ReadError, TransportError
from weightsync.faults import inject
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.snapshots import Held
from weightsync.holder.staging import Staging
from weightsync.holder.update import BucketConsumer, pump
from weightsync.plan import Plan
from weightsync.plan.broadcast.plan import Portion, all_portions
from weightsync.protocol.messages import Refilled, Snapshot, SnapshotHeader
from weightsync.transports import Pending

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging
    from weightsync.holder.second_copy import SecondCopy

_STEP_NBYTES = 256 << 20  # between two steps it can be stopped
_NUM_AHEAD = 2  # enough to keep the link busy


class _Stoppable:
    """A refill from memory that others own. It is stopped between two steps."""

    _stopped = ""

    def stop(self, cause: str) -> None:
        """Stop `run`, from any thread. It then raises TransportError(`cause`)."""
        self._stopped = cause

    def close(self) -> None:
        """Release nothing: the snapshot store owns the memory."""

    def _check_runs(self) -> None:
        if self._stopped:
            raise TransportError(self._stopped)


class Restore(_Stoppable):
    """A refill from memory mapped here: copies `held`, described by `header`, over `flat`."""

    def __init__(
        self,
        held: Held,
        header: SnapshotHeader,
        flat: FlatSnapshot,
        staging: Staging,
        consumer: BucketConsumer,
        timeout_s: float,
    ) -> None:
        self._held, self._header, self._flat = held, header, flat
        self._staging, self._consumer, self._timeout_s = staging, consumer, timeout_s

    def run(self) -> Refilled:
        """Copy everything, then check that the header is still the same.

        Raises TransportError when it was stopped, DeadlineError when the device hangs, ReadError when the
        snapshot was replaced during the copy.
        """
        begun = time.perf_counter()
        data = self._held.bytes
        firsts = range(0, len(data), _STEP_NBYTES)
        under_way: deque[Pending] = deque()
        for number, first in enumerate(firsts):
            inject("refill", bucket=number, num_buckets=len(firsts))
            self._check_runs()
            self._flat.load(data[first : first + _STEP_NBYTES], first)
            under_way.append(self._staging.mark(f"filling from byte {first} on", self._timeout_s))
            if len(under_way) > _NUM_AHEAD:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()
        holder = self._held.holder
        _check(self._held, self._header)
        self._consumer.finish(0)
        return Refilled({holder: len(data)}, {holder: self._held.way}, time.perf_counter() - begun)


class BucketRestore(_Stoppable):
    """A refill on a device, bucket by bucket as in an update, only with the bytes that the rank needs.

    `held` has all parts of `snapshot`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        held: Mapping[int, Held],
        plan: Plan,
        staging: DeviceStaging,
        consumer: BucketConsumer,
        timeout_s: float,
    ) -> None:
        self._snapshot, self._held, self._plan = snapshot, held, plan
        self._staging, self._consumer, self._timeout_s = staging, consumer, timeout_s
        self._bytes = {part: its.bytes for part, its in held.items()}
        self._nbytes = Counter[str]()

    def run(self) -> Refilled:
        """Copy everything, then check that the headers are still the same. Raises as `Restore.run`."""
        begun, num_buckets = time.perf_counter(), self._plan.num_buckets
        pump(range(num_buckets), self._plan.slots, self._start, self._arrived, self._consumer)
        for part, held in self._held.items():
            _check(held, SnapshotHeader(self._snapshot.version, self._snapshot.layout, part))
        self._consumer.finish(num_buckets)
        ways = {held.holder: held.way for held in self._held.values()}
        return Refilled(dict(self._nbytes), ways, time.perf_counter() - begun)

    def _portions(self, bucket: int) -> Sequence[Portion]:
        """Return the portions to copy: all of the bucket if the engine rank reads the slots itself."""
        return self._staging.needs[bucket] if self._staging.writes else all_portions(self._plan, bucket)

    def _start(self, bucket: int) -> Sequence[Pending]:
        self._check_runs()
        parts = []
        for each in self._portions(bucket):
            parts.append((each.offset, self._bytes[each.part][each.source : each.source + each.nbytes]))
            self._nbytes[self._held[each.part].holder] += each.nbytes
        return self._staging.load(bucket, parts, self._timeout_s)

    def _arrived(self, bucket: int) -> None:
        portions, struck = self._portions(bucket), None
        if portions:
            portion = portions[bucket % len(portions)]
            struck = self._staging.slot(bucket)[portion.offset : portion.offset + portion.nbytes]
        inject("refill", bucket=bucket, num_buckets=self._plan.num_buckets, data=struck)


class SecondCopyRestore(_Stoppable):
    """A refill from the second copy on the engine rank's GPU."""

    def __init__(self, copy: SecondCopy, consumer: BucketConsumer, num_buckets: int) -> None:
        self._copy, self._consumer, self._num_buckets = copy, consumer, num_buckets

    def run(self) -> Refilled:
        """Copy everything. Raises TransportError when it was stopped, DeadlineError when the device hangs."""
        begun = time.perf_counter()
        inject("refill", bucket=0, num_buckets=1, data=self._copy.struck())
        self._check_runs()
        self._copy.write()
        self._consumer.finish(self._num_buckets)
        return Refilled({}, {}, time.perf_counter() - begun)


def _check(held: Held, header: SnapshotHeader) -> None:
    """Raise ReadError if `held` does not match `header`."""
    if (found := held.header) != header:
        raise ReadError(held.holder, f"it holds {found or 'no snapshot'}, not {header}")
