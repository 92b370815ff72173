"""A holder while a fleet connects: it makes the memory and the connections of a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from weightsync import faults
from weightsync.channel.feed import HolderFeed
from weightsync.config import Ports, TlsFiles
from weightsync.holder.broadcasts import Communicators
from weightsync.holder.cross_host import ExchangeEnd
from weightsync.holder.live_source import LiveSource
from weightsync.holder.process import HolderProcess
from weightsync.holder.refill import RefillRuns
from weightsync.holder.send_buffer import MappedSendBuffer, SendBuffer, buffer_handle, send_buffer_for
from weightsync.holder.snapshots import Copy, SnapshotContent
from weightsync.holder.staging import HostStaging, Staging
from weightsync.memory.device import DeviceBuffer
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan, RankLayout
from weightsync.plan.cross_host.cross_host import BundleTable, CrossHostTerms
from weightsync.plan.direct.alike import Alike, LocalReads
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.device_memory import DeviceMemory, LiveMemory, RankMemory, read_handles
from weightsync.protocol.handles import BufferHandle, DeviceHandle, HostExport
from weightsync.protocol.messages import Exchange, FeedTicket, Group, Prepared
from weightsync.readers import ENCRYPTED
from weightsync.transports import Transport, transport_class

if TYPE_CHECKING:
    from weightsync.holder.device_staging import DeviceStaging  # imports CuPy


class ConnectingHolder(HolderProcess):
    """Base of `Holder`: has this holder's part in a plan.

    Attributes:
        staging: the bucket slots. None before `prepare`.
        cross_host: this holder's part in the cross-host exchange, or None.
    """

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
        super().__init__(name, host, transport, device, ports, tls)
        self._transport = partial(transport_class(transport), tls)
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
        self._live_source = LiveSource(name, host, ports, ENCRYPTED if tls else "zeromq")
        self._runs = RefillRuns(name)
        self._moving, self._preparing, self._make_staging = threading.Lock(), threading.Lock(), make_staging

    @property
    def transports(self) -> Mapping[Group, Transport]:
        """The communicators of this holder's broadcasts, by members.

        Empty before `prepare`, and without buckets.
        """
        return self._groups.transports if self._groups else {}

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
        self._send_buffer = held = send_buffer_for(plan, sender, source, before, self._trainer, send_buffer)
        self._published = Copy(held) if isinstance(held, SharedBuffer) else held
        handle = buffer_handle(held)
        engine = next((name for name, holders in plan.members.engines if index in holders), None)
        self.staging = self._stage(plan, index, engine is not None)
        self._plan, self._plan_digest, self._index, self._trainer = plan, digest, index, trainer
        self._feed = None if engine is None else self._open_feed(engine, self.staging, handle)
        # On devices every holder has slots to receive into, and one NCCL communicator is cheaper than many.
        self._groups = Communicators(plan, index, bool(self._device), self._transport)
        offers = self._groups.offers(self._host, self._ports)
        ticket = self._feed.ticket if self._feed else None
        return Prepared(digest, handle, ticket, offers)

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
            self._feed = self._open_feed(engine, self.staging, buffer_handle(self._send_buffer))
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
        if memory := self._mapped:
            with self._working():
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
        if faults.active:
            faults.inject("connect")
        self._groups.join(offers, timeout_s)

    def accept(self, timeout_s: float, engine: DeviceMemory | None = None) -> None:
        """Start to map `engine`; wait for the hello of the engine rank.

        Raises DeadlineError, WireError, PeerError, EngineError or TransportError.
        """
        with self._moving:  # `adopt` and `close` wait before they close the feed
            if engine and (memory := self._mapped):
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
        plan = self._plan
        assert self._groups
        with self._working() as staging:
            self._groups.warm_up(staging.device)
            has_any = plan and plan.slots and plan.num_buckets
            for pending in self._groups.fill(0, staging, timeout_s) if has_any else ():
                pending.wait()

    def route(
        self, reads: LocalReads, memory: Mapping[int, DeviceMemory], alike: Alike | None = None
    ) -> None:
        """Prepare direct copies from trainers' `memory`. Valid until the next `link`."""
        if mapped := self._mapped:
            with self._working():
                mapped.route(parts := reads.whole(alike), read_handles(parts, memory))
                if self.cross_host:  # the engine rank's memory may have changed
                    self.cross_host.aim()

    def exchange(
        self, terms: CrossHostTerms, rank: int, sent: Mapping[int, BundleTable], received: BundleTable | None
    ) -> Exchange:
        """Plan and allocate the messages of rank `rank`, as `CrossHostTerms.plan`. Raises TransportError."""
        memory, members = self._mapped, terms.members
        assert memory
        with self._working():
            plan = terms.plan(rank, sent, received)
            self.cross_host = ExchangeEnd(members, rank, plan, self._transport(), memory)
        return self.cross_host.offer(self._host, self._ports)

    def meet(self, rendezvous: str, timeout_s: float) -> None:
        """Open the communicator of the cross-host exchange and use each path once. Raises TransportError."""
        assert self.cross_host
        with self._working():
            self.cross_host.open(rendezvous, timeout_s)

    def drop_engine(self) -> None:
        """Give up the engine rank. A `move` that waits for the rank continues without it."""
        if self._mapped:
            self._live_source.end()
        if self._feed:
            self._feed.drop()

    @property
    def _mapped(self) -> DeviceStaging | None:
        return staging.mapped if (staging := self.staging) else None

    @contextmanager
    def _working(self) -> Iterator[Staging]:
        """Run the body between moves, on the queue of the bucket slots."""
        assert self.staging
        with self._moving, self.staging.queue():
            yield self.staging

    def _open_feed(self, engine: str, staging: Staging, send_buffer: BufferHandle | None) -> HolderFeed:
        handle = None if self._device else send_buffer
        return HolderFeed(self.name, engine, staging.slots, handle, self._trainer)

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
