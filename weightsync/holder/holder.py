"""The process part that owns a GPU's (or CPU slot's) share of the bytes: arena, buckets, communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from weightsync.channel.engine_end import HolderFeed
from weightsync.errors import ConfigError, StateError
from weightsync.faults import arm, strike
from weightsync.holder.broadcasts import Communicators
from weightsync.holder.cross_host import Exchange
from weightsync.holder.refill import Refill, Restore, open_refill
from weightsync.holder.send_buffer import Arena, MappedArena, arena_for, keepable, written
from weightsync.holder.snapshots import Keepable, Keeper
from weightsync.holder.staging import HostStaging, Staging
from weightsync.holder.trainer_parts import copied_parts, digest_parts, parts_in_place
from weightsync.holder.update import Outlet, carry_out, open_outlet
from weightsync.memory.gpu_usage import Gauge, used_nbytes
from weightsync.memory.tensors import device_id
from weightsync.plan import Plan, RankLayout, Reads
from weightsync.protocol.handles import Export, HostExport, Offer
from weightsync.protocol.messages import (
    FeedTicket,
    Group,
    Kept,
    Label,
    Moved,
    Part,
    Prepared,
    Refilled,
    Samples,
    Share,
    Way,
)
from weightsync.protocol.timing import PhaseClock
from weightsync.transports import Pending, Transport, transport_class

if TYPE_CHECKING:
    from weightsync.faults import Fault
    from weightsync.memory.device import DeviceBuffer
    from weightsync.protocol.handles import DeviceHandle
    from weightsync.protocol.messages import Digests

__all__ = ["Holder"]

_PATIENCE = 0.5, 0.9
"""Of a move's time, what one wait for an engine rank may take, and what all may together.

Others wait a move's time for each bucket: what is over is for the bucket to come.
"""


class Holder:
    """One member of every communicator; serves at most one trainer rank and one engine rank."""

    def __init__(
        self,
        name: str,
        host: str,
        transport: str = "gloo",
        device: str = "",
        make_staging: Callable[[Plan, int, Arena | None, bool], Staging] = HostStaging,
    ) -> None:
        """`host` is this host's address as other holders reach it. `device` is the GPU that buckets lie on,
        ``cuda:<UUID>``, and the first that this process sees; they lie in host memory where it is empty:
        in what `make_staging` makes.
        """
        self._make_staging = make_staging
        self.name, self._host, self._device = name, host, device
        self._transport_name, self._transport = transport, transport_class(transport)
        self._gauge: Gauge | None = None
        self._plan: Plan | None = None
        self._plan_digest, self._index, self._trainer = "", -1, -1
        self._groups: Communicators | None = None
        self._exchange: Exchange | None = None
        self._arena: Arena | None = None
        self._read: RankLayout | None = None
        self._staging: Staging | None = None
        self._slots: Sequence[DeviceBuffer] = ()
        self._retired: Sequence[DeviceBuffer] = ()
        self._feed: HolderFeed | None = None
        self._keeper: Keeper | None = None
        self._refill: Refill | Restore | None = None
        self._moving, self._preparing = threading.Lock(), threading.Lock()
        self._watched = threading.Event()

    def __repr__(self) -> str:
        """What Ray writes before each line of its log."""
        return self.name

    @property
    def staging(self) -> Staging | None:
        """Where its buckets lie. None before `prepare`."""
        return self._staging

    @property
    def transports(self) -> Mapping[Group, Transport]:
        """What its broadcasts go through, by members. Empty before `prepare`, and without buckets."""
        return self._groups.transports if self._groups else {}

    @property
    def cross_host(self) -> Exchange | None:
        """Its part in the messages between hosts. None where it has none."""
        return self._exchange

    @property
    def keeper(self) -> Keeper | None:
        """What it keeps of committed versions. None before `lend`."""
        return self._keeper

    def ready(self) -> tuple[str, str]:
        """Its name and its transport. Raises what its device says: an error there stays for good."""
        if self._device:
            torch.cuda.current_stream().query()
        return self.name, self._transport_name

    def watch(self) -> None:
        """Ends with this process, or when somebody else watches it: its controller has died then."""
        self.gauge(on=False)  # that one may have left it running
        self._watched.set()
        self._watched = watched = threading.Event()
        watched.wait()

    def sync_arm(self, who: str, faults: Sequence[Fault], seed: int) -> None:
        """See `weightsync.faults.arm`."""
        arm(who, faults, seed)

    def prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        """Take memory for `plan` as holder `index`, and leave what an earlier plan used.

        `source`: the device of its trainer rank's layout, read in place if it is this holder's. An arena
        whose bytes the new plan lays out alike is kept. Raises TransportError when memory is short.
        """
        with self._preparing:  # for a controller that has died, it may be running still
            return self._prepare(plan, index, source)

    def _prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        self._leave()
        before, self._plan = self._plan, None  # what fails half-way leaves nothing to be kept
        digest = plan.digest()
        trainers, engines = plan.members.trainers, dict(plan.members.engines)
        trainer = trainers.index(index) if index in trainers else -1
        in_place = bool(self._device) and source == self._device
        arena, self._arena = self._arena, None
        self._arena = arena_for(plan, -1 if in_place else trainer, source, before, arena)
        engine = next((name for name, holders in engines.items() if index in holders), None)
        self._staging = self._stage(plan, index, engine is not None)
        self._plan, self._plan_digest, self._index, self._trainer = plan, digest, index, trainer
        if engine is not None:
            self._feed = self._open_feed(engine, self._staging)
        # On devices every holder has slots to receive into, and NCCL's communicators are dear.
        self._groups = Communicators(plan, index, bool(self._device), self._transport)
        offers = self._groups.offers(self._host)
        return Prepared(digest, written(self._arena), self._feed.ticket if self._feed else None, offers)

    def source(self, name: str, exports: Mapping[str, HostExport | None]) -> None:
        """See `MappedArena.source`; without effect where trainers publish now."""
        if isinstance(self._arena, MappedArena):
            self._arena.source(name, exports, bool(self._device))

    def adopt(self, plan: Plan, engine: str) -> FeedTicket:
        """A ticket for an engine rank that takes another's place here, or that came after the connecting.

        What else this holder does in `plan` goes on. One that had no part in it only serves this rank.
        """
        self.drop_engine()
        digest = plan.digest()
        if unknown := self._plan is None or self._plan_digest != digest:
            self._leave()
        with self._moving:
            if unknown:
                self._plan, self._plan_digest, self._index, self._trainer = plan, digest, -1, -1
                self._staging = self._stage(plan, -1, receives=True)
            elif self._staging is None or len(self._staging.slots) < plan.slots:
                self._staging = self._stage(plan, self._index, receives=True)
            if self._feed:
                self._feed.close()
            self._feed = self._open_feed(engine, self._staging)
            return self._feed.ticket

    def link(self, engine: Export | None, trainer: Export | None = None) -> None:
        """Map the engine rank's memory, in place of the last, and the trainer's. Raises TransportError."""
        if self._staging:
            with self._moving, self._staging.queue():
                if trainer:
                    self._staging.connect(trainer)
                    self._read = trainer.layout
                self._staging.link(engine)

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        """Open every communicator, in the same order on every holder. Raises TransportError."""
        assert self._groups
        self._groups.join(offers, timeout_s)

    def accept(self, timeout_s: float) -> None:
        """Wait for the engine rank's hello. Raises DeadlineError or WireError."""
        with self._moving:  # who takes the feed away waits for the end
            if self._feed:
                self._feed.accept(self._plan_digest, timeout_s)
        for slot in self._retired:  # who is of this epoch has mapped others
            slot.close()
        self._retired = ()

    def warm_up(self, timeout_s: float) -> None:
        """Use every path once, so that no update pays its first use.

        Each communicator sends a byte from each rank; then the first bucket is sent as an update
        would, but goes no further. Raises TransportError or DeadlineError.
        """
        plan, staging = self._plan, self._staging
        assert plan is not None
        assert staging is not None
        assert self._groups
        with self._moving, staging.queue():
            self._groups.warm_up(staging.device)
            if plan.slots and plan.num_buckets:
                for pending in self._start(plan, staging, 0, timeout_s):
                    pending.wait()

    def route(self, reads: Reads, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        """See `Staging.route`; it holds until the engine rank is linked anew."""
        if self._staging:
            with self._moving, self._staging.queue():
                self._staging.route(reads, memory)
                if self._exchange:  # the engine rank has other memory than the last one
                    self._exchange.aim()

    def exchange(self, part: Part) -> str:
        """Take memory for messages; where to meet, if this is the first member. Raises TransportError."""
        assert self._staging
        with self._moving, self._staging.queue():
            self._exchange = Exchange(part, self._transport(), self._staging)
        return self._exchange.offer(self._host)

    def meet(self, rendezvous: str, timeout_s: float) -> None:
        """Open the communicator of messages, and use each path once. Raises TransportError."""
        assert self._staging
        assert self._exchange
        with self._moving, self._staging.queue():
            self._exchange.open(rendezvous, timeout_s)

    def move(self, attempt: int, feeding: bool, way: Way, timeout_s: float) -> Moved:
        """Run the plan once: broadcast every bucket and, if `feeding`, bring them to the engine rank.

        Raises TransportError when the broadcast fails. Whatever
        is raised, the communicators are left with it as the cause, so that nobody waits for this holder.
        An engine rank that fails or falls silent is left behind and does not hold the others up: the answer
        says so if it was too slow, else its own `load` does.
        """
        plan, staging = self._plan, self._staging
        if plan is None or staging is None:
            raise StateError(f"{self.name} has no plan: connect first")
        clock = PhaseClock()
        with clock.phase("move"), self._moving, staging.queue():
            outlet = self._run(plan, staging, attempt, feeding, way, timeout_s)
        return Moved(clock.spans[0], outlet.waited_s, outlet.slow)

    def _run(
        self, plan: Plan, staging: Staging, attempt: int, feeding: bool, way: Way, timeout_s: float
    ) -> Outlet:
        limits_s = _PATIENCE[0] * timeout_s, _PATIENCE[1] * timeout_s
        only = way.cast if way.pulls else None
        outlet = open_outlet(staging, self._feed, feeding, attempt, plan.slots, *limits_s, only=only)
        start = partial(self._start, plan, staging, timeout_s=timeout_s)
        try:
            carry_out(plan, way, self._index, staging, self._exchange, start, outlet)
        except Exception as error:
            # Also one of the device or of NCCL: who waits for this holder would wait for its deadline.
            cause = f"{self.name}: {type(error).__name__}: {error}"
            self.abort(cause)
            outlet.cancel(cause)
            raise
        return outlet

    def digests(self) -> Digests:
        """Of what its trainer rank published as it is now, in its arena or in place: see `Source.publish`.

        Raises StateError when it serves no trainer rank.
        """
        plan, staging, trainer, arena = self._plan, self._staging, self._trainer, self._arena
        if plan is None or staging is None or trainer < 0:
            raise StateError(f"{self.name} serves no trainer rank: connect first")
        with self._moving, staging.queue():
            if self._read:
                parts = parts_in_place(plan, trainer, self._read, staging.source)
            elif isinstance(arena, MappedArena):
                parts = arena.held()
            else:
                assert arena is not None
                parts = copied_parts(plan, trainer, arena)
            return digest_parts(plan, parts)

    def lend(self, protocol: str, rdma_device: str) -> None:
        """Be ready to `keep`. Raises ConfigError when the protocol cannot be had: see `choose_protocol`."""
        if self._keeper is None:
            self._keeper = Keeper(self.name, self._host, protocol, rdma_device)

    def keep(self, label: Label, is_image: bool, expected: Digests) -> Offer:
        """See `Keeper.keep`: what its trainer published or, if `is_image`, what its engine rank serves."""
        strike("commit", version=label.version)
        with self._moving if is_image else nullcontext():
            return self._lent().keep(label, expected, self._keepable(is_image))

    def reserve(self, part: int, is_image: bool) -> Offer | None:
        """Take memory for `keep`; none for a checkpoint: engines wait. Raises TransportError without it."""
        what = self._keepable(is_image)
        return None if isinstance(what, MappedArena) else self._lent().reserve(part, what.nbytes)

    def map(self, part: int, offer: Offer) -> None:
        """See `Keeper.map`."""
        self._lent().map(part, offer)

    def _keepable(self, is_image: bool) -> Keepable:
        found = (self._staging and self._staging.image) if is_image else keepable(self._arena)
        if not found:
            raise StateError(f"{self.name} has nothing to keep: it is being connected anew")
        return found

    def mirror(self, share: Share, timeout_s: float) -> Offer:
        """Keep what another holder keeps, too. Raises as `Keeper.mirror`."""
        return self._lent().mirror(share, timeout_s)

    def kept(self) -> list[Share]:
        """See `Keeper.kept`."""
        return self._keeper.kept() if self._keeper else []

    def refill(self, attempt: int, kept: Kept, direct: bool, timeout_s: float, limit_s: float) -> Refilled:
        """Bring the engine rank to a version that others keep, bucket by bucket.

        `timeout_s` is for a bucket, `limit_s` for all. Raises ReadError or DeadlineError naming the
        holder that failed when nobody else keeps the same; TransportError when it was stopped.
        """
        plan, staging = self._plan, self._staging
        if plan is None or staging is None or self._feed is None:
            raise StateError(f"{self.name} has no engine to refill: connect first")
        with self._moving, staging.queue():
            limits_s = timeout_s, limit_s
            outlet = open_outlet(staging, self._feed, True, attempt, plan.slots, *limits_s, whole=True)
            try:
                keeper = self._keeper if direct else None
                self._refill = open_refill(plan, kept, keeper, staging, outlet, direct, timeout_s)
                return self._refill.run()
            except Exception as error:
                outlet.cancel(f"{self.name}: {type(error).__name__}: {error}")
                raise
            finally:
                if self._refill:
                    self._refill.close()
                    self._refill = None

    def stop_refill(self, cause: str) -> None:
        """End a running `refill`, which then raises TransportError."""
        if refill := self._refill:
            refill.stop(cause)

    def abort(self, cause: str) -> None:
        """Leave the communicators at once, also out of a running `move`, which then raises TransportError."""
        for each in (self._groups, self._exchange):
            if each:
                each.abort(cause)

    def drop_engine(self) -> None:
        """Give the engine rank up, also while `move` waits for it."""
        if self._feed:
            self._feed.drop()

    def gauge(self, on: bool) -> tuple[str, Samples]:
        """Begin or end to look: which device, and what was seen; nothing where there is none."""
        seen: Samples = self._gauge.stop() if self._gauge else ()
        self._gauge = Gauge(used_nbytes) if on and self._device else None
        return self._device, seen

    def close(self) -> None:
        """Leave the communicators and free the memory."""
        self._leave()
        for taken in (*self._slots, *self._retired, self._arena, self._keeper):
            if taken:
                taken.close()
        self._slots = self._retired = ()
        self._arena = self._plan = self._keeper = None

    def _open_feed(self, engine: str, staging: Staging) -> HolderFeed:
        beside = None if self._device else written(self._arena)
        return HolderFeed(self.name, engine, staging.slots, beside, self._trainer)

    def _lent(self) -> Keeper:
        if self._keeper is None:
            raise StateError(f"{self.name} keeps nothing yet: connect first")
        return self._keeper

    def _start(self, plan: Plan, staging: Staging, bucket: int, timeout_s: float) -> list[Pending]:
        """Queue the filling of this holder's share of a bucket, and its broadcasts."""
        assert self._groups
        return [*staging.fill(bucket, timeout_s), *self._groups.start(bucket, staging)]

    def _stage(self, plan: Plan, index: int, receives: bool) -> Staging:
        if not self._device:
            return self._make_staging(plan, index, self._arena, receives)
        from weightsync.holder.device_staging import DeviceStaging, take_slots

        if (found := device_id(torch.device("cuda", 0))) != self._device:
            raise ConfigError("device", self._device, f"the first that this process sees is {found}")
        self._slots, retired = take_slots(plan, self._slots)
        self._retired = (*self._retired, *retired)
        return DeviceStaging(plan, index, self._arena, self._slots)

    def _leave(self) -> None:
        self.drop_engine()
        for each in (self._groups, self._exchange):
            if each:
                each.close()
        with self._moving:  # one that its controller gave up may be running still, until its deadline
            if self._feed:
                self._feed.close()
            if self._staging:
                self._staging.close()
        self._groups = self._exchange = self._feed = self._staging = self._read = None
