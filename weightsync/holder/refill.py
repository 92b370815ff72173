"""Refills an engine rank, bucket by bucket, from snapshots of several holders at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from weightsync import faults
from weightsync.errors import DeadlineError, ReadError, StateError, TransportError, WeightSyncError
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.restore import BucketRestore, Restore, SecondCopyRestore
from weightsync.holder.snapshots import HEADER_NBYTES, SnapshotStore, read_headers
from weightsync.holder.staging import Staging
from weightsync.holder.update import BucketConsumer
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.plan.broadcast.plan import Portion, all_portions
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Refilled, Snapshot, SnapshotHeader, SnapshotPart
from weightsync.readers import Read, Reader, open_reader
from weightsync.transports import Pending

logger = logging.getLogger("weightsync.holder")

_PATIENCE = 0.3
"""Fraction of an engine rank's wait for a bucket that one peer may take: others can then be tried."""
STEP_NBYTES = 16 << 20
"""Bytes of one read. Each read has a deadline, and after a failed read another source continues."""


class RefillSink(Protocol):
    """Brings buckets to the engine rank. `Refill` calls it, bucket by bucket, `targets` in turn."""

    @property
    def num_buckets(self) -> int: ...

    @property
    def targets(self) -> Sequence[SharedBuffer]: ...

    def portions(self, bucket: int) -> Sequence[Portion]:
        """Return the portions to read for a bucket."""

    def wait_free(self, bucket: int) -> None:
        """Wait until the bucket's target may be written."""

    def land(self, bucket: int) -> None:
        """Start moving a bucket, complete in its target, to the destination."""

    def finish(self) -> None:
        """Wait until all buckets are there, then tell the engine rank."""


class PartSink:
    """Writes a part into memory that others read, behind the header.

    This is a `RefillSink` without an engine rank.
    """

    def __init__(self, part: int, buffer: SharedBuffer) -> None:
        self._part, self.targets = part, (buffer,)
        self._nbytes = buffer.handle.nbytes - HEADER_NBYTES

    @property
    def num_buckets(self) -> int:
        return -(-self._nbytes // STEP_NBYTES)

    def portions(self, bucket: int) -> Sequence[Portion]:
        first = bucket * STEP_NBYTES
        nbytes = min(STEP_NBYTES, self._nbytes - first)
        return [Portion(self._part, first, HEADER_NBYTES + first, nbytes)]

    def wait_free(self, bucket: int) -> None:
        """Do nothing: no two buckets share a place."""

    def land(self, bucket: int) -> None:
        """Do nothing: the target is where it stays."""

    def finish(self) -> None: ...


class Refill:
    """The refill of one engine rank. Another peer with the same part replaces a peer that fails."""

    def __init__(self, snapshot: Snapshot, sink: RefillSink, may_map: bool, timeout_s: float) -> None:
        """`timeout_s`: the engine rank's wait for a bucket; `may_map`: map snapshots on this host."""
        self._snapshot, self._sink, self._may_map = snapshot, sink, may_map
        self._timeout_s = timeout_s
        self._peers, self._reserve = _by_peer(snapshot.parts), _by_peer(snapshot.reserve)
        most = [len(self._peers[part]) + len(self._reserve.get(part, ())) for part in self._peers]
        self._scratch = SharedBuffer.create(HEADER_NBYTES * sum(most))
        self._targets = [*sink.targets, self._scratch]
        self._reader: Reader | None = None
        self._lock, self._stopped = threading.Lock(), ""
        self._nbytes: Counter[str] = Counter()
        self._ways: dict[str, str] = {}
        self._left = set[str]()

    def run(self) -> Refilled:
        """Read all buckets in order. While one is loaded, the next is read.

        Raises ReadError or DeadlineError, naming the holder, when no holder of a part is left; TransportError
        when it was stopped.
        """
        begun = time.perf_counter()
        for bucket in range(self._sink.num_buckets):
            self._sink.wait_free(bucket)
            self._read_bucket(bucket, self._sink.portions(bucket), bucket % (len(self._targets) - 1))
            self._sink.land(bucket)
        try:
            self._check(self._open())  # no snapshot may have been replaced during the reads
        except ReadError as error:
            raise ReadError(_holder(error.peer), error.cause) from error
        self._sink.finish()
        return Refilled(dict(self._nbytes), dict(self._ways), time.perf_counter() - begun, (*self._left,))

    def stop(self, cause: str) -> None:
        """Stop `run`, from any thread. It then raises TransportError(`cause`)."""
        with self._lock:
            self._stopped = cause
            if self._reader:
                self._reader.close()

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._scratch.close()

    def _read_bucket(self, bucket: int, portions: Sequence[Portion], target: int) -> None:
        while True:
            try:
                reader = self._open()
                reads = [
                    read
                    for turn, portion in enumerate(portions, start=bucket)
                    for read in self._reads(turn, portion, target)
                ]
                done = reader.read(reads, self._patience)
            except (ReadError, DeadlineError) as error:
                self._leave((error.peer,) if isinstance(error, ReadError) else error.missing, error)
            else:
                for peer, nbytes in done.items():
                    self._nbytes[_holder(peer)] += nbytes
                return

    @property
    def _patience(self) -> float:
        return _PATIENCE * self._timeout_s

    def _open(self) -> Reader:
        with self._lock:
            if self._stopped:
                raise TransportError(self._stopped)
            if self._reader:
                return self._reader
        offers = {peer: offer for peers in self._peers.values() for peer, offer in peers.items()}
        reader = open_reader(self._targets, offers, may_map=self._may_map)
        with self._lock:
            self._reader = reader  # from now on `stop` ends the reads, also of headers
            if self._stopped:
                raise TransportError(self._stopped)
        self._check(reader)
        self._ways |= {_holder(peer): way for peer, way in reader.ways.items()}
        return reader

    def _check(self, reader: Reader) -> None:
        peers = {peer: part for part, known in self._peers.items() for peer in known}
        found = read_headers(reader, [*peers], self._scratch, len(self._targets) - 1, self._patience)
        for peer, part in peers.items():
            wanted = SnapshotHeader(self._snapshot.version, self._snapshot.layout, part)
            if found[peer] != wanted:
                raise ReadError(peer, f"it holds {found[peer] or 'no snapshot'}, not {wanted}")

    def _reads(self, turn: int, portion: Portion, target: int) -> Iterator[Read]:
        """Spread `portion` over all peers that have it. Peers take turns with small portions."""
        peers = [*self._peers[portion.part]]
        for i, cut in enumerate(cut_portion(portion, len(peers)), start=turn):
            yield Read(peers[i % len(peers)], HEADER_NBYTES + cut.source, target, cut.offset, cut.nbytes)

    def _leave(self, peers: Iterable[str], error: WeightSyncError) -> None:
        """Continue without `peers`. Raises ReadError or DeadlineError if one of them had the last copy."""
        for peer in peers:
            part = next(number for number, known in self._peers.items() if peer in known)
            del self._peers[part][peer]
            if not self._peers[part]:
                self._peers[part] = self._reserve.pop(part, {})
            if not self._peers[part]:
                if isinstance(error, ReadError):
                    raise ReadError(_holder(peer), error.cause) from error
                raise DeadlineError("refill", (_holder(peer),), self._patience) from error
            self._left.add(_holder(peer))
            logger.warning("going on without %s: %s", peer, error)
        with self._lock:
            if self._reader:
                self._reader.close()
                self._reader = None


def _by_peer(parts: Mapping[int, Sequence[Offer]]) -> dict[int, dict[str, Offer]]:
    return {part: {f"{offer.holder}:{part}": offer for offer in offers} for part, offers in parts.items()}


def _holder(peer: str) -> str:
    return peer.rpartition(":")[0]


LEAST_CUT_NBYTES = 256 << 10
"""Reads of fewer bytes take about as long as this one."""


def cut_portion(portion: Portion, num_cuts: int) -> list[Portion]:
    """Cut `portion` into at most `num_cuts` portions of equal size, each of `LEAST_CUT_NBYTES` or more.

    The last portion may be smaller.
    """
    step = max(-(-portion.nbytes // num_cuts), LEAST_CUT_NBYTES)
    return [
        Portion(portion.part, portion.source + at, portion.offset + at, min(step, portion.nbytes - at))
        for at in range(0, portion.nbytes, step)
    ]


class BucketSink:
    """Puts buckets into the slots. The engine rank takes them as in an update."""

    def __init__(self, plan: Plan, staging: Staging, consumer: BucketConsumer, timeout_s: float) -> None:
        self._plan, self._staging, self._consumer, self._timeout_s = plan, staging, consumer, timeout_s
        self.targets = staging.targets()

    @property
    def num_buckets(self) -> int:
        return self._plan.num_buckets

    def portions(self, bucket: int) -> Sequence[Portion]:
        return all_portions(self._plan, bucket)

    def wait_free(self, bucket: int) -> None:
        self._consumer.wait_free(bucket)

    def land(self, bucket: int) -> None:
        _inject(self, bucket)
        self._staging.put(bucket, self._timeout_s)
        self._consumer.offer(bucket)

    def finish(self) -> None:
        self._consumer.finish(self.num_buckets)


class FlatSink:
    """Writes part `part`, a flat snapshot, over the engine rank's live memory."""

    def __init__(
        self, flat: FlatSnapshot, part: int, staging: Staging, consumer: BucketConsumer, timeout_s: float
    ) -> None:
        self._flat, self._part = flat, part
        self._staging, self._consumer, self._timeout_s = staging, consumer, timeout_s
        self.targets = staging.targets()
        self._step = len(self.targets[0].tensor)
        self._landing: deque[Pending] = deque()

    @property
    def num_buckets(self) -> int:
        return -(-self._flat.nbytes // self._step)

    def portions(self, bucket: int) -> Sequence[Portion]:
        first, nbytes = self._range(bucket)
        return [Portion(self._part, first, 0, nbytes)]

    def wait_free(self, bucket: int) -> None:
        if len(self._landing) == len(self.targets):
            self._landing.popleft().wait()

    def land(self, bucket: int) -> None:
        _inject(self, bucket)
        first, nbytes = self._range(bucket)
        self._flat.load(self.targets[bucket % len(self.targets)].tensor[:nbytes], first)
        self._landing.append(self._staging.mark(f"filling of bucket {bucket}", self._timeout_s))

    def finish(self) -> None:
        self._consumer.finish(0)

    def _range(self, bucket: int) -> tuple[int, int]:
        first = bucket * self._step
        return first, min(self._step, self._flat.nbytes - first)


def _inject(sink: RefillSink, bucket: int) -> None:
    if faults.active:
        portions = sink.portions(bucket)
        struck = portions[bucket % len(portions)]
        data = sink.targets[bucket % len(sink.targets)].tensor[struck.offset : struck.offset + struck.nbytes]
        faults.inject("refill", bucket=bucket, num_buckets=sink.num_buckets, data=data)


AnyRefill: TypeAlias = Refill | Restore | BucketRestore | SecondCopyRestore


class RefillRuns:
    """The refills of one holder's engine rank, one at a time, and the holder's copies for its host."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._running: list[AnyRefill] = []

    def run(self, opened: Callable[[], AnyRefill], staging: Staging, consumer: BucketConsumer) -> Refilled:
        """Run the refill that `opened` returns, as `open_refill`. On an error the engine rank is told.

        Raises ReadError or DeadlineError naming the holder that failed when no other holder has the same
        part; TransportError when it was stopped.

        The memory of the rank before it is unmapped afterwards.
        """
        try:
            return self._run(opened())
        except Exception as error:
            consumer.cancel(f"{self._holder}: {type(error).__name__}: {error}")
            raise
        finally:
            staging.unmap_forgotten()

    def copy(
        self, store: SnapshotStore, snapshot_part: SnapshotPart, others: Sequence[Offer], timeout_s: float
    ) -> Offer:
        """Copy another holder's part to `store`. Reads this holder and `others`, as `Refill.run` does."""
        header, offers = snapshot_part.header, (snapshot_part.offer, *others)
        snapshot = Snapshot(header.version, header.layout, {header.part: offers})
        with store.receiving(snapshot_part) as (buffer, offer):
            done = self._run(Refill(snapshot, PartSink(header.part, buffer), True, timeout_s))
        logger.info("copied part %d of version %d: %s", header.part, header.version, dict(done.bytes_from))
        return offer

    def stop(self, cause: str) -> None:
        """Stop the running refill, which then raises TransportError(`cause`)."""
        for each in [*self._running]:
            each.stop(cause)

    def _run(self, refill: AnyRefill) -> Refilled:
        self._running.append(refill)
        try:
            return refill.run()
        finally:
            refill.close()
            self._running.remove(refill)


def open_refill(
    plan: Plan,
    snapshot: Snapshot,
    snapshots: SnapshotStore | None,
    staging: Staging,
    consumer: BucketConsumer,
    may_map: bool,
    timeout_s: float,
) -> AnyRefill:
    """Return the refill of the engine rank from `snapshot`.

    `snapshots` is this holder's store, if the store's memory may be read. Raises StateError for a flat
    snapshot when this holder does not write the engine rank's memory.
    """
    if not snapshot.is_flat:
        second = staging.mapped.second_copy() if staging.mapped and snapshot.on_device else None
        if second and second.holds(snapshot):
            return SecondCopyRestore(second, consumer, plan.num_buckets)
        if snapshots and staging.mapped and (parts := snapshots.parts(snapshot)):
            return BucketRestore(snapshot, parts, plan, staging.mapped, consumer, timeout_s)
        return Refill(snapshot, BucketSink(plan, staging, consumer, timeout_s), may_map, timeout_s)
    flat = staging.mapped.flat if staging.mapped else None
    if flat is None:
        raise StateError("this engine copies buckets itself, so a flat snapshot of its memory cannot be used")
    (part,) = snapshot.parts
    header = SnapshotHeader(snapshot.version, snapshot.layout, part)
    if snapshots and (held := snapshots.held(header)):
        return Restore(held, header, flat, staging, consumer, timeout_s)
    return Refill(snapshot, FlatSink(flat, part, staging, consumer, timeout_s), may_map, timeout_s)
