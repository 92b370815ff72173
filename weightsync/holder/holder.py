"""A holder: send buffer, bucket slots and communicators of one GPU or CPU slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from weightsync import faults
from weightsync.errors import DeadlineError, StateError
from weightsync.holder.connecting import ConnectingHolder
from weightsync.holder.refill import open_refill
from weightsync.holder.send_buffer import MappedSendBuffer, published_parts
from weightsync.holder.snapshots import SnapshotContent, SnapshotStore
from weightsync.holder.staged_parts import StagedParts
from weightsync.holder.staging import Staging
from weightsync.holder.trainer_parts import copied_parts, digest_parts
from weightsync.holder.update import BucketConsumer, open_consumer, patience, run_update
from weightsync.memory.kernels.digests import tensor_digests
from weightsync.memory.kernels.fingerprints import fingerprint
from weightsync.plan import Plan
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import (
    Digests,
    Fingerprint,
    Forward,
    LiveDigest,
    Moved,
    Read,
    Refilled,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
    UpdateTask,
)
from weightsync.protocol.timing import PhaseClock
from weightsync.readers import ENCRYPTED


class Holder(ConnectingHolder):
    """Moves bytes for at most one trainer rank and one engine rank.

    Attributes:
        snapshot_store: this holder's snapshots of committed versions. None before `serve_snapshots`.
    """

    snapshot_store: SnapshotStore | None = None
    _staged_parts: StagedParts | None = None

    def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved:
        """Run this holder's part of one update.

        Raises TransportError when a transfer fails. On any error the communicators are aborted with it as
        the cause, so that no other holder waits. An engine rank that fails or stops answering is left out.
        """
        plan, staging = self._prepared()
        is_fed, clock = not isinstance(task, Forward), PhaseClock()
        writing = self._writing(staging, attempt) if is_fed else nullcontext()
        with clock.phase("move"), self._turn("move", timeout_s), writing, staging.queue():
            consumer = self._run(plan, staging, attempt, task, timeout_s)
        return Moved(clock.spans[0], consumer.waited_s, consumer.slow)

    def _run(
        self, plan: Plan, staging: Staging, attempt: int, task: UpdateTask, timeout_s: float
    ) -> BucketConsumer:
        only, limits_s = task.cast if isinstance(task, Read) else None, patience(timeout_s)
        feed = None if isinstance(task, Forward) else self._feed
        consumer = open_consumer(staging, feed, attempt, plan.slots, *limits_s, only=only)
        assert self._groups
        start = partial(self._groups.fill, staging=staging, timeout_s=timeout_s)
        for each in (self._groups, self.cross_host):
            if each and each.timeout_s != timeout_s:  # in the first update, and if the exchange is new
                each.set_timeout(timeout_s)
        try:
            run_update(plan, task, self._index, staging, self.cross_host, start, consumer)
        except Exception as error:
            # Errors of the device and of NCCL too: other holders would wait until their deadline.
            cause = f"{self.name}: {type(error).__name__}: {error}"
            self.abort(cause)
            consumer.cancel(cause)
            raise
        return consumer

    def digests(self) -> Digests:
        """Digest the trainer rank's published tensors again, as `Source.publish`. Raises StateError."""
        plan, staging, trainer = self._plan, self.staging, self._trainer
        if plan is None or staging is None or trainer < 0:
            raise StateError(f"{self.name} serves no trainer rank: connect first")
        with self._moving, staging.queue():
            read = (self._read, staging.mapped.source) if self._read and staging.mapped else None
            return digest_parts(plan, published_parts(plan, trainer, self._send_buffer, read))

    def serve_snapshots(self, protocol: str, rdma_device: str) -> None:
        """Prepare to serve snapshots. Raises ConfigError if `choose_protocol` cannot provide `protocol`.

        With TLS, only Mooncake's protocols are not encrypted, which are not chosen by ``auto`` then.
        """
        if self._tls and protocol in ("auto", "zeromq"):
            protocol = ENCRYPTED
        if self.snapshot_store is None:
            self.snapshot_store = SnapshotStore(self.name, self._host, protocol, rdma_device, self._ports)

    def snapshot(
        self, header: SnapshotHeader, is_flat: bool, expected: Fingerprint, live: LiveDigest | None
    ) -> Offer:
        """Snapshot the published weights or, if `is_flat`, the engine rank's, as in `SnapshotPart`."""
        if faults.active:
            faults.inject("commit", version=header.version)
        with self._moving if is_flat else nullcontext():
            return self._store().snapshot(header, expected, self._snapshot_content(is_flat), live=live)

    def reserve(self, part: int, is_flat: bool) -> Offer | None:
        """Allocate memory for `snapshot`; mapped checkpoints need none. Raises TransportError."""
        faults.inject("reserve")
        what = self._snapshot_content(is_flat)
        return None if isinstance(what, MappedSendBuffer) else self._store().reserve(part, what.nbytes)

    def map(self, offers: Mapping[int, Sequence[Offer]]) -> None:
        """Map snapshots of other holders on this host, as `MappedParts.map`. Raises PeerLostError."""
        self._store().mapped.map(offers)

    def _snapshot_content(self, is_flat: bool) -> SnapshotContent:
        found = (self._mapped and self._mapped.flat) if is_flat else self._published
        if not found:
            raise StateError(f"{self.name} has nothing to keep: it is being connected again")
        return found

    def replicate(self, snapshot_part: SnapshotPart, timeout_s: float, others: Sequence[Offer] = ()) -> Offer:
        """Copy another holder's snapshot, as `RefillRuns.copy`. Raises as `refill`."""
        return self._runs.copy(self._store(), snapshot_part, others, timeout_s)

    def release(self, header: SnapshotHeader) -> None:
        """Free a snapshot that `replicate` made, as `SnapshotStore.release`."""
        self._store().release(header)

    def snapshots(self) -> list[SnapshotPart]:
        """Return this holder's complete snapshots, after pending writes finish."""
        return self.snapshot_store.snapshots() if self.snapshot_store else []

    def copy_digests(self, header: SnapshotHeader | None) -> Digests | None:
        """Digest a copy again: the fingerprint of a trainer rank's part, or `FlatSnapshot.digests`.

        This tells a damaged copy from a broken engine. Without a `header`, digest the engine rank's memory.
        Returns None if it is not here, or if the copy's header is damaged.
        """
        with self._moving:
            plan, flat = self._plan, self._mapped.flat if self._mapped else None
            if header is None:
                return flat.digests() if flat else None
            held = self._store().own(header)
            if held is None or plan is None:
                return None
            if header.layout != plan.content():
                return tensor_digests([held.bytes])
            return fingerprint(digest_parts(plan, copied_parts(plan, header.part, held.bytes)))

    def reserve_staged(self, parts: Sequence[int], on_device: bool) -> StagingMemory:
        """Allocate memory to stage `parts` in and, if `on_device`, on the GPU, as `StagedParts`."""
        plan, staging = self._prepared()
        engine = staging.mapped if on_device else None
        self._staged_parts = StagedParts(plan, self._store(), parts, engine, staging.device)
        return self._staged_parts.memory

    def stage(self, task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
        """Stage parts of the next version beside the snapshots, as `StagedParts.stage`."""
        if self._staged_parts is None:
            raise StateError(f"{self.name} has no memory to stage in: connect first")
        return self._staged_parts.stage(task, self._published, timeout_s)

    def keep_staged(self, version: int) -> None:
        """Turn the staged parts of the committed `version` into the snapshots."""
        faults.inject("commit", version=version)
        self._store().keep(version)

    def refill(
        self, attempt: int, snapshot: Snapshot, may_map: bool, timeout_s: float, limit_s: float
    ) -> Refilled:
        """Bring the engine rank to the version of `snapshot`, bucket by bucket.

        `timeout_s` is for one bucket, `limit_s` for all. Raises as `RefillRuns.run`.
        """
        plan, staging, feed = self._plan, self.staging, self._feed
        if plan is None or staging is None or feed is None:
            raise StateError(f"{self.name} has no engine to refill: connect first")
        with self._turn("refill", limit_s), self._writing(staging, attempt), staging.queue():
            consumer = open_consumer(staging, feed, attempt, plan.slots, timeout_s, limit_s, snapshot)
            store = self.snapshot_store if may_map else None
            opened = partial(open_refill, plan, snapshot, store, staging, consumer, may_map, timeout_s)
            return self._runs.run(opened, staging, consumer)

    def stop_refill(self, cause: str) -> None:
        """End a running `refill` or `replicate`, which then raises TransportError."""
        self._runs.stop(cause)

    def offer_live(self, header: SnapshotHeader, attempt: int) -> Offer:
        """Let peers read the engine rank's live memory, as `LiveSource.offer`. A `move` is waited for."""
        with self._moving:
            return self._live_source.offer(header, self._mapped.flat if self._mapped else None, attempt)

    def withdraw_live(self, attempt: int) -> None:
        """End the offers of `offer_live`, as `LiveSource.withdraw`."""
        self._live_source.withdraw(attempt)

    def abort(self, cause: str) -> None:
        """Leave the communicators at once. A running `move` then raises TransportError."""
        for each in (self._groups, self.cross_host):
            if each:
                each.abort(cause)

    def close(self) -> None:
        """End running work, leave the communicators and free the memory. `watch` returns."""
        self.abort(cause := f"{self.name} is closed")
        self.stop_refill(cause)
        self._watched.set()
        self._stop_node()
        with self._preparing:
            self._leave()
            for taken in (self.snapshot_store, self._send_buffer, *self._slots, *self._retired):
                if taken:
                    taken.close()

    @contextmanager
    def _turn(self, phase: str, timeout_s: float) -> Iterator[None]:
        """Run the body after earlier work has ended. Raises DeadlineError if that takes too long.

        The driver has given the call up by then, and the engine may serve: nothing may write to it.
        """
        if not self._moving.acquire(timeout=timeout_s):
            raise DeadlineError(phase, (self.name,), timeout_s)
        try:
            yield
        finally:
            self._moving.release()

    def _writing(self, staging: Staging, attempt: int) -> AbstractContextManager[None]:
        """Let no peer read the engine rank's memory, if it is mapped, while the body writes it."""
        return self._live_source.writing(attempt) if staging.mapped else nullcontext()

    def _store(self) -> SnapshotStore:
        if self.snapshot_store is None:
            raise StateError(f"{self.name} has no snapshots yet: connect first")
        return self.snapshot_store

    def _prepared(self) -> tuple[Plan, Staging]:
        if self._plan is None or self.staging is None:
            raise StateError(f"{self.name} has no plan: connect first")
        return self._plan, self.staging
