"""A holder: send buffer, bucket slots and communicators of one GPU or CPU slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from weightsync.channel.engine_end import HolderFeed
from weightsync.config import Ports, TlsFiles
from weightsync.errors import StateError
from weightsync.faults import Fault, inject, set_faults
from weightsync.holder.broadcasts import Communicators
from weightsync.holder.copy_digests import copy_digests
from weightsync.holder.cross_host import ExchangeEnd
from weightsync.holder.live_source import LiveSource
from weightsync.holder.refill import RefillRuns
from weightsync.holder.send_buffer import (
    MappedSendBuffer,
    SendBuffer,
    published_parts,
    send_buffer_for,
    snapshot_content,
    written,
)
from weightsync.holder.snapshots import SnapshotContent, SnapshotStore
from weightsync.holder.staged_parts import StagedParts
from weightsync.holder.staging import HostStaging, Staging
from weightsync.holder.trainer_parts import digest_parts
from weightsync.holder.update import BucketConsumer, open_consumer, patience, run_update
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.gpu_usage import MemorySampler, used_nbytes
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node, serve
from weightsync.plan import Plan, RankLayout
from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms
from weightsync.plan.direct.alike import Alike, LocalReads
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, RankMemory, read_handles
from weightsync.protocol.handles import DeviceHandle, HostExport, Offer
from weightsync.protocol.messages import (
    Digests,
    Exchange,
    FeedTicket,
    Fingerprint,
    Forward,
    Group,
    LiveDigest,
    Moved,
    Prepared,
    Read,
    Refilled,
    Samples,
    Snapshot,
    SnapshotHeader,
    SnapshotPart,
    StagedPart,
    StageTask,
    StagingMemory,
    UpdateTask,
)
from weightsync.protocol.peers import HolderPeer
from weightsync.protocol.routes import keep_to_interface_of
from weightsync.protocol.timing import PhaseClock
from weightsync.readers import ENCRYPTED
from weightsync.transports import Transport, transport_class


class Holder:
    """Moves bytes for at most one trainer rank and one engine rank.

    Attributes:
        staging: the bucket slots. None before `prepare`.
        cross_host: this holder's part in the cross-host exchange, or None.
        snapshot_store: this holder's snapshots of committed versions. None before `serve_snapshots`.
        protocol: the methods that the node answers.
    """

    protocol: type = HolderPeer

    def __init__(
        self,
        name: str,
        host: str,
        transport: str = "gloo",
        device: str = "",
        make_staging: Callable[[Plan, int, SendBuffer | None, bool], Staging] = HostStaging,
        ports: Ports | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """
        Args:
            host: this host's address as other holders reach it.
            device: ``cuda:<UUID>`` of the buckets' GPU, the first that this process sees; "" for host memory.
            make_staging: makes the bucket slots in host memory.
            ports: the range of the ports on which it listens; any free ones without it.
            tls: this process's files, to encrypt connections between hosts.
        """
        keep_to_interface_of(host)
        self.name, self._host, self._ports, self._device = name, host, ports, device
        self._transport_name, self._tls = transport, tls
        self._transport = partial(transport_class(transport), tls)
        self._sampler: MemorySampler | None = None
        self._plan: Plan | None = None
        self._plan_digest, self._index, self._trainer = "", -1, -1
        self._groups: Communicators | None = None
        self.cross_host: ExchangeEnd | None = None
        self._send_buffer: SendBuffer | None = None
        self._published: SnapshotContent | None = None
        self._read: RankLayout | None = None
        self.staging: Staging | None = None
        self._slots: Sequence[DeviceBuffer] = ()
        self._retired: Sequence[DeviceBuffer] = ()
        self._feed: HolderFeed | None = None
        self.snapshot_store: SnapshotStore | None = None
        self._staged_parts: StagedParts | None = None
        self._live_source = LiveSource(name, host, ports, ENCRYPTED if tls else "zeromq")
        self._runs = RefillRuns(name)
        self._moving, self._preparing, self._make_staging = threading.Lock(), threading.Lock(), make_staging
        self._watched = threading.Event()
        self._node: Node | None = None

    def __repr__(self) -> str:
        """Return the name that Ray puts before each line of this holder's log."""
        return self.name

    @property
    def transports(self) -> Mapping[Group, Transport]:
        """The communicators of this holder's broadcasts, by members.

        Empty before `prepare`, and without buckets.
        """
        return self._groups.transports if self._groups else {}

    def ready(self) -> tuple[str, str, Ports | None, TlsFiles | None]:
        """Return name, transport, ports and files of TLS. Raises the device's error, which is permanent."""
        if self._device:
            torch.cuda.current_stream().query()
        return self.name, self._transport_name, self._ports, self._tls

    def watch(self) -> None:
        """Block until this process ends, until `close`, or until a new driver calls `watch`."""
        self.sample_memory(on=False)  # a driver that died may have left it on
        self._watched.set()
        self._watched = watched = threading.Event()
        watched.wait()

    def serve_node(self, offer: NodeOffer) -> None:
        """Have a node answer the driver's calls. Raises as `Node.serve` if the driver is not reached."""
        self._stop_node()
        self._node = serve(offer, self, self.protocol)
        self._node.welcomed.result()

    def _stop_node(self) -> None:
        if self._node:  # of a driver that died, or of a link that has ended
            self._node.stop()

    def set_faults(self, process: str, faults: Sequence[Fault], seed: int) -> None:
        """Set the faults to inject here, as `weightsync.faults.set_faults` does."""
        set_faults(process, faults, seed)

    def try_mapping(self, memory: Mapping[str, DeviceHandle]) -> str:
        """Map, read and unmap `memory` of trainers, by their names. Returns why that fails, or "".

        Leaves an earlier plan first, since trainers may have freed memory that it has mapped.
        """
        if not self._device:
            return f"{self.name} has its buckets in host memory"
        from weightsync.holder.mapped_trainers import try_mapping

        with self._preparing:
            self._leave()
        reason = try_mapping(memory)
        return f"{self.name} cannot map the memory of {reason}" if reason else ""

    def prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        """Allocate memory for `plan` as holder `index`, and release the memory of an earlier plan.

        `source`: the device of the trainer rank's layout, whose memory is read in place on the holder's
        device. A send buffer is used again if the new plan has the same layout for it. Raises TransportError.
        """
        with self._preparing:  # a call from a driver that died may still be running
            return self._prepare(plan, index, source)

    def _prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        self._leave()
        before, self._plan = self._plan, None  # if this fails half-way, the next call keeps no buffer
        trainers, digest = plan.members.trainers, plan.digest()
        trainer = trainers.index(index) if index in trainers else -1
        sender = -1 if self._device and source == self._device else trainer  # else it is read in place
        send_buffer, self._send_buffer, self._published = self._send_buffer, None, None
        self._send_buffer = send_buffer_for(plan, sender, source, before, send_buffer)
        self._published = snapshot_content(self._send_buffer)
        engine = next((name for name, holders in plan.members.engines if index in holders), None)
        self.staging = self._stage(plan, index, engine is not None)
        self._plan, self._plan_digest, self._index, self._trainer = plan, digest, index, trainer
        self._feed = None if engine is None else self._open_feed(engine, self.staging)
        # On devices every holder has slots to receive into, and one NCCL communicator is cheaper than many.
        self._groups = Communicators(plan, index, bool(self._device), self._transport)
        offers = self._groups.offers(self._host, self._ports)
        ticket = self._feed.ticket if self._feed else None
        return Prepared(digest, written(self._send_buffer), ticket, offers)

    def source(self, name: str, exports: Mapping[str, HostExport | None]) -> None:
        """Map checkpoints and publish one (`MappedSendBuffer.source`). Ignored by other send buffers."""
        if isinstance(self._send_buffer, MappedSendBuffer):
            self._send_buffer.source(name, exports, bool(self._device))

    def adopt(self, plan: Plan, engine: str) -> FeedTicket:
        """Return a ticket for an engine rank that joins after the connect.

        It may replace another rank. The rest of this holder's part in `plan` is unchanged. A holder that has
        another plan, or none, then serves only this rank.
        """
        self.drop_engine()
        if unknown := self._plan is None or self._plan_digest != plan.digest():
            self._leave()
        with self._moving:
            if unknown:
                self._plan, self._plan_digest, self._index, self._trainer = plan, plan.digest(), -1, -1
            if unknown or self.staging is None or len(self.staging.slots) < plan.slots:
                self.staging = self._stage(plan, self._index, receives=True)
            if self._feed:
                self._feed.close()
            self.staging.forget_engine()
            self._feed = self._open_feed(engine, self.staging)
            return self._feed.ticket

    def link(
        self,
        engine: RankMemory | LiveMemory | None,
        trainer: RankMemory | None = None,
        engine_layout: LayoutTable | None = None,
        trainer_layout: LayoutTable | None = None,
    ) -> None:
        """Map the trainer's memory and the engine rank's, see `DeviceStaging.link`. Raises TransportError.

        Layouts come from `RankMemory.export`. No bucket is written to `LiveMemory`.
        """
        if self.staging and (memory := self.staging.mapped):
            with self._moving, self.staging.queue():
                self._live_source.end()
                if trainer:
                    memory.connect(export := trainer.export(trainer_layout))
                    self._read = export.layout
                memory.link(engine.export(engine_layout) if engine else None)
        else:
            assert engine is trainer is None, "a holder in host memory maps no device memory"

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        """Open every communicator, in the same order on every holder. Raises TransportError."""
        assert self._groups
        inject("connect")
        self._groups.join(offers, timeout_s)

    def accept(self, timeout_s: float, engine: DeviceMemory | None = None) -> None:
        """Start to map `engine`; wait for the hello of the engine rank.

        Raises DeadlineError, WireError, PeerError, EngineError or TransportError.
        """
        with self._moving:  # `adopt` and `close` wait before they close the feed
            if engine and self.staging and (memory := self.staging.mapped):
                memory.map_ahead(engine)
            if self._feed:
                self._feed.accept(self._plan_digest, timeout_s)
        for slot in self._retired:  # engine ranks of this epoch have mapped the new slots
            slot.close()
        self._retired = ()

    def warm_up(self, timeout_s: float) -> None:
        """Use every path once, so that no update includes the first use of a path.

        Communicators send a byte from each rank, then the first bucket, which is discarded. Raises as `move`.
        """
        plan, staging = self._plan, self.staging
        assert staging is not None
        assert self._groups
        with self._moving, staging.queue():
            self._groups.warm_up(staging.device)
            has_any = plan and plan.slots and plan.num_buckets
            for pending in self._groups.fill(0, staging, timeout_s) if has_any else ():
                pending.wait()

    def route(
        self, reads: LocalReads, memory: Mapping[int, DeviceMemory], alike: Alike | None = None
    ) -> None:
        """Prepare direct copies from trainers' `memory`. Valid until the next `link`."""
        if self.staging and (mapped := self.staging.mapped):
            with self._moving, self.staging.queue():
                mapped.route(parts := reads.whole(alike), read_handles(parts, memory))
                if self.cross_host:  # the engine rank's memory may have changed
                    self.cross_host.aim()

    def exchange(
        self, terms: CrossHostTerms, rank: int, sent: Mapping[int, BundleTable], received: BundleTable | None
    ) -> Exchange:
        """Plan and allocate the messages of rank `rank`, as `CrossHostTerms.plan`. Raises TransportError."""
        assert self.staging
        memory, members = self.staging.mapped, terms.members
        assert memory
        with self._moving, self.staging.queue():
            plan = terms.plan(rank, sent, received)
            self.cross_host = ExchangeEnd(members, rank, plan, self._transport(), memory)
        return self.cross_host.offer(self._host, self._ports)

    def meet(self, rendezvous: str, timeout_s: float) -> None:
        """Open the communicator of the cross-host exchange and use each path once. Raises TransportError."""
        assert self.staging
        assert self.cross_host
        with self._moving, self.staging.queue():
            self.cross_host.open(rendezvous, timeout_s)

    def move(self, attempt: int, task: UpdateTask, timeout_s: float) -> Moved:
        """Run this holder's part of one update.

        Raises TransportError when a transfer fails. On any error the communicators are aborted with it as
        the cause, so that no other holder waits. An engine rank that fails or stops answering is left out.
        """
        plan, staging = self._plan, self.staging
        if plan is None or staging is None:
            raise StateError(f"{self.name} has no plan: connect first")
        is_fed = not isinstance(task, Forward)
        clock, writing = PhaseClock(), self._live_source.writing(attempt) if is_fed else nullcontext()
        with clock.phase("move"), self._moving, writing, staging.queue():
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
        inject("commit", version=header.version)
        with self._moving if is_flat else nullcontext():
            return self._store().snapshot(header, expected, self._snapshot_content(is_flat), live=live)

    def reserve(self, part: int, is_flat: bool) -> Offer | None:
        """Allocate memory for `snapshot`; mapped checkpoints need none. Raises TransportError."""
        inject("reserve")
        what = self._snapshot_content(is_flat)
        return None if isinstance(what, MappedSendBuffer) else self._store().reserve(part, what.nbytes)

    def map(self, offers: Mapping[int, Sequence[Offer]]) -> None:
        """Map snapshots of other holders on this host, as `SnapshotStore.map`. Raises PeerLostError."""
        self._store().map(offers)

    def _snapshot_content(self, is_flat: bool) -> SnapshotContent:
        mapped = self.staging.mapped if self.staging else None
        found = (mapped and mapped.flat) if is_flat else self._published
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
        """Digest a snapshot again, or the engine rank's memory, as `copy_digests`."""
        with self._moving:
            return copy_digests(self._plan, self.staging, self._store(), header)

    def reserve_staged(self, parts: Sequence[int], on_device: bool) -> StagingMemory:
        """Allocate memory to stage `parts` in and, if `on_device`, on the GPU, as `StagedParts`."""
        if self._plan is None or self.staging is None:
            raise StateError(f"{self.name} has no plan: connect first")
        engine = self.staging.mapped if on_device else None
        self._staged_parts = StagedParts(self._plan, self._store(), parts, engine, self.staging.device)
        return self._staged_parts.memory

    def stage(self, task: StageTask, timeout_s: float) -> Sequence[StagedPart]:
        """Stage parts of the next version beside the snapshots, as `StagedParts.stage`."""
        if self._staged_parts is None:
            raise StateError(f"{self.name} has no memory to stage in: connect first")
        return self._staged_parts.stage(task, self._published, timeout_s)

    def keep_staged(self, version: int) -> None:
        """Turn the staged parts of the committed `version` into the snapshots."""
        inject("commit", version=version)
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
        with self._moving, self._live_source.writing(attempt), staging.queue():
            consumer = open_consumer(staging, feed, attempt, plan.slots, timeout_s, limit_s, snapshot)
            return self._runs.run(plan, snapshot, self.snapshot_store, staging, consumer, may_map, timeout_s)

    def stop_refill(self, cause: str) -> None:
        """End a running `refill` or `replicate`, which then raises TransportError."""
        self._runs.stop(cause)

    def offer_live(self, header: SnapshotHeader, attempt: int) -> Offer:
        """Let peers read the engine rank's live memory, as `LiveSource.offer`. A `move` is waited for."""
        with self._moving:
            mapped = self.staging.mapped if self.staging else None
            return self._live_source.offer(header, mapped.flat if mapped else None, attempt)

    def withdraw_live(self, attempt: int) -> None:
        """End the offers of `offer_live`, as `LiveSource.withdraw`."""
        self._live_source.withdraw(attempt)

    def abort(self, cause: str) -> None:
        """Leave the communicators at once. A running `move` then raises TransportError."""
        for each in (self._groups, self.cross_host):
            if each:
                each.abort(cause)

    def drop_engine(self) -> None:
        """Give up the engine rank. A `move` that waits for the rank continues without it."""
        self._live_source.end()
        if self._feed:
            self._feed.drop()

    def sample_memory(self, on: bool) -> tuple[str, Samples]:
        """Start or stop the memory sampler. Returns the device and the samples; without a device, neither."""
        seen: Samples = self._sampler.stop() if self._sampler else ()
        self._sampler = MemorySampler(used_nbytes) if on and self._device else None
        return self._device, seen

    def close(self) -> None:
        """End running work, leave the communicators and free the memory.

        `watch` returns.
        """
        self.abort(cause := f"{self.name} is closed")
        self.stop_refill(cause)
        self._watched.set()
        self._stop_node()
        with self._preparing:
            self._leave()
            for taken in (self.snapshot_store, self._send_buffer, *self._slots, *self._retired):
                if taken:
                    taken.close()

    def _open_feed(self, engine: str, staging: Staging) -> HolderFeed:
        send_buffer = None if self._device else written(self._send_buffer)
        return HolderFeed(self.name, engine, staging.slots, send_buffer, self._trainer)

    def _store(self) -> SnapshotStore:
        if self.snapshot_store is None:
            raise StateError(f"{self.name} has no snapshots yet: connect first")
        return self.snapshot_store

    def _stage(self, plan: Plan, index: int, receives: bool) -> Staging:
        if not self._device:
            return self._make_staging(plan, index, self._send_buffer, receives)
        from weightsync.holder.device_staging import DeviceStaging, check_device, take_slots

        check_device(self._device)
        self._slots, retired = take_slots(plan, self._slots)
        self._retired = (*self._retired, *retired)
        return DeviceStaging(plan, index, self._send_buffer, self._slots)

    def _leave(self) -> None:
        self.drop_engine()
        for each in (self._groups, self.cross_host):
            if each:
                each.close()
        with self._moving:  # a move that the driver gave up may run until its deadline
            for held in (self._feed, self.staging):
                if held:
                    held.close()
        self._groups = self.cross_host = self._feed = self.staging = self._read = None
