"""The process part that owns a GPU's (or CPU slot's) share of the bytes: arena, buckets, communicators."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.buffers import Export
from weightsync.errors import ConfigError, DeadlineError, EngineError, StateError
from weightsync.feed import FeedTicket, HolderFeed
from weightsync.memory import BufferHandle, SharedBuffer
from weightsync.modules import device_id
from weightsync.plan import Plan, broadcast_groups
from weightsync.staging import HostStaging, Staging
from weightsync.transports import Broadcast, Pending, Transport, transport_class

if TYPE_CHECKING:
    from weightsync.device_memory import DeviceBuffer

__all__ = ["Group", "Holder", "Prepared"]

logger = logging.getLogger("weightsync.holder")

_PATIENCE = 0.9
"""Of a move's time, what an engine rank may take of it: the rest is for the buckets still to come."""

Group = tuple[int, ...]
"""The holders of one communicator, ascending; a holder's rank is its place."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a holder has ready for one membership epoch.

    Attributes:
        plan_digest: as this holder computed it.
        arena: where its trainer rank publishes; None if it serves none, or reads its memory in place.
        ticket: how its engine rank reaches it, if it serves one.
        offers: rendezvous of the communicators whose first rank it is, by their members.
    """

    plan_digest: str
    arena: BufferHandle | None
    ticket: FeedTicket | None
    offers: Mapping[Group, str]


class Holder:
    """One member of every communicator; serves at most one trainer rank and one engine rank."""

    def __init__(self, name: str, host: str, transport: str = "gloo", device: str = "") -> None:
        """`host` is this host's address as other holders reach it.

        `device` is the GPU that buckets lie on, ``cuda:<UUID>``, and the first that this process
        sees; they lie in host memory where it is empty.
        """
        self.name, self._host, self._device = name, host, device
        self._transport = transport_class(transport)
        self._plan: Plan | None = None
        self._plan_digest, self._index = "", -1
        self._group_of: dict[int, Group] = {}
        self._groups: dict[Group, Transport] = {}
        self._arena: SharedBuffer | None = None
        self._staging: Staging | None = None
        self._slots: Sequence[DeviceBuffer] = ()
        self._retired: Sequence[DeviceBuffer] = ()
        self._feed: HolderFeed | None = None
        self._moving = threading.Lock()

    def ready(self) -> None:
        """Whether it can go on. Raises what its device says: an error there stays until the process ends."""
        if self._device:
            torch.cuda.current_stream().query()

    def prepare(self, plan: Plan, index: int, source: str) -> Prepared:
        """Take memory for `plan` as holder `index`, and leave what an earlier plan used.

        `source` is the device that its trainer rank's weights lie on: they are read in place if it
        is this holder's, else published into an arena. An arena whose bytes the new plan lays out
        the same way is kept with what it holds. Raises TransportError when memory does not suffice.
        """
        self._leave()
        before, self._plan = self._plan, None  # what fails half-way leaves nothing to be kept
        digest = plan.digest()
        trainers, engines = plan.members.trainers, dict(plan.members.engines)
        trainer = trainers.index(index) if index in trainers else -1
        in_place = bool(self._device) and source == self._device
        self._keep_arena(before, plan, -1 if in_place else trainer)
        engine = next((name for name, holders in engines.items() if index in holders), None)
        self._staging = staging = self._stage(plan, index, engine is not None)
        arena = self._arena.handle if self._arena else None
        if engine is not None:
            beside = None if self._device else arena
            self._feed = HolderFeed(self.name, engine, staging.slots, beside, trainer)
        self._plan, self._plan_digest, self._index = plan, digest, index
        # On devices every holder has slots to receive into, and NCCL's communicators are dear.
        groups = broadcast_groups(plan.members, together=bool(self._device))
        self._group_of = {root: group for root, group in groups.items() if index in group and len(group) > 1}
        self._groups = {group: self._transport() for group in sorted(set(self._group_of.values()))}
        offers = {g: transport.offer(self._host) for g, transport in self._groups.items() if g[0] == index}
        return Prepared(digest, arena, self._feed.ticket if self._feed else None, offers)

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        """Open every communicator, in the same order on every holder. Raises TransportError."""
        for group, transport in self._groups.items():
            transport.open(offers[group], group.index(self._index), len(group), timeout_s)

    def accept(self, timeout_s: float) -> None:
        """Wait for the engine rank's hello. Raises DeadlineError or WireError."""
        if self._feed:
            self._feed.accept(self._plan_digest, timeout_s)
        for slot in self._retired:  # who is of this epoch has mapped others
            slot.close()
        self._retired = ()

    def warm_up(self, trainer: Export | None, engine: Export | None, timeout_s: float) -> None:
        """Map what is exported, and use every path once, so that no update pays its first use.

        Each communicator sends a byte from each rank; then the first bucket is sent as an update
        would, but goes no further. Raises TransportError or DeadlineError.
        """
        plan, staging = self._plan, self._staging
        assert plan is not None
        assert staging is not None
        with self._moving, staging.queue():
            staging.connect(trainer, engine)
            for group, transport in self._groups.items():
                ops = [
                    Broadcast(torch.zeros(1, dtype=torch.uint8, device=staging.device), root)
                    for root in range(len(group))
                ]
                transport.start(ops).wait()
            for pending in self._start(plan, staging, 0, timeout_s) if plan.num_buckets else ():
                pending.wait()

    def move(self, attempt: int, feeding: bool, timeout_s: float) -> float:
        """Run the plan once: broadcast every bucket and, if `feeding`, hand it to the engine rank.

        Returns the seconds it took. Raises TransportError when the broadcast fails. Whatever is raised,
        the communicators are left with it as the cause, so that nobody waits for this holder. An
        engine rank that fails or falls silent is left behind and does not hold the others up: its own
        `load` reports it.
        """
        plan, staging = self._plan, self._staging
        if plan is None or staging is None:
            raise StateError(f"{self.name} has no plan: connect first")
        with self._moving, staging.queue():
            return self._run(plan, staging, attempt, feeding, timeout_s)

    def _run(self, plan: Plan, staging: Staging, attempt: int, feeding: bool, timeout_s: float) -> float:
        begun = time.perf_counter()
        outlet: _Feeding | _Writing
        if staging.writes and self._feed:
            outlet = _Writing(staging, self._feed if feeding else None, attempt, timeout_s)
        else:
            outlet = _Feeding(self._feed if feeding else None, attempt, plan.slots, timeout_s)
        ahead: deque[tuple[int, Sequence[Pending]]] = deque()

        def hand_over() -> None:
            bucket, started = ahead.popleft()
            for pending in started:
                pending.wait()
            outlet.offer(bucket)

        try:
            for bucket in range(plan.num_buckets):
                outlet.wait_free(bucket)
                ahead.append((bucket, self._start(plan, staging, bucket, timeout_s)))
                if len(ahead) == plan.slots:
                    hand_over()
            while ahead:
                hand_over()
            outlet.finish(plan.num_buckets)
        except Exception as error:
            # Also one of the device or of NCCL: who waits for this holder would wait for its deadline.
            cause = f"{self.name}: {type(error).__name__}: {error}"
            self.abort(cause)
            outlet.cancel(cause)
            raise
        return time.perf_counter() - begun

    def abort(self, cause: str) -> None:
        """Leave the communicators at once, also out of a running `move`, which then raises TransportError."""
        for transport in self._groups.values():
            transport.abort(cause)

    def drop_engine(self) -> None:
        """Give the engine rank up, also while `move` waits for it."""
        if self._feed:
            self._feed.drop()

    def close(self) -> None:
        """Leave the communicators and free the memory."""
        self._leave()
        for slot in (*self._slots, *self._retired):
            slot.close()
        self._slots = self._retired = ()
        if self._arena:
            self._arena.close()
            self._arena = None
        self._plan = None

    def _start(self, plan: Plan, staging: Staging, bucket: int, timeout_s: float) -> list[Pending]:
        """Queue the filling of this holder's share of a bucket, and its broadcasts."""
        started = list(staging.fill(bucket, timeout_s))
        for group, transport in self._groups.items():
            steps = [step for step in plan.bucket_steps(bucket) if self._group_of.get(step.root) == group]
            if steps:
                ops = [Broadcast(staging.at(step), group.index(step.root)) for step in steps]
                started.append(transport.start(ops))
        return started

    def _stage(self, plan: Plan, index: int, receives: bool) -> Staging:
        if not self._device:
            return HostStaging(plan, index, self._arena, receives)
        from weightsync.device_staging import DeviceStaging, take_slots

        if (found := device_id(torch.device("cuda", 0))) != self._device:
            raise ConfigError("device", self._device, f"the first that this process sees is {found}")
        self._slots, retired = take_slots(plan, self._slots)
        self._retired = (*self._retired, *retired)
        return DeviceStaging(plan, index, self._arena, self._slots)

    def _keep_arena(self, old: Plan | None, plan: Plan, trainer: int) -> None:
        if self._arena is not None:
            if (
                trainer >= 0
                and old
                and old.tensors == plan.tensors
                and (old.trainer_pieces(trainer) == plan.trainer_pieces(trainer))
            ):
                return
            self._arena.close()
            self._arena = None
        if trainer >= 0:
            self._arena = SharedBuffer.create(plan.arena_nbytes(trainer))

    def _leave(self) -> None:
        self.drop_engine()
        for group in self._groups.values():
            group.close()
        with self._moving:  # one that its controller gave up may be running still, until its deadline
            if self._feed:
                self._feed.close()
            if self._staging:
                self._staging.close()
        self._group_of, self._groups, self._feed, self._staging = {}, {}, None, None


class _Feeding:
    """The engine rank's side of one move; without a feed, or after its first failure, it does nothing."""

    def __init__(self, feed: HolderFeed | None, attempt: int, num_slots: int, timeout_s: float) -> None:
        self._feed, self._attempt, self._timeout_s = feed, attempt, timeout_s
        self._until = time.monotonic() + _PATIENCE * timeout_s
        self._num_slots = num_slots
        self._read = 0

    def wait_free(self, bucket: int) -> None:
        """Wait until the slot that `bucket` goes to has been read."""
        self.finish(bucket - self._num_slots + 1)

    def offer(self, bucket: int) -> None:
        if self._feed:
            self._feed.offer(self._attempt, bucket)

    def finish(self, num_buckets: int) -> None:
        """Wait until the first `num_buckets` buckets have been read."""
        while self._feed and self._read < num_buckets:
            try:
                # The others wait for us at each bucket, and the controller for all of them.
                left = min(self._timeout_s / 2, self._until - time.monotonic())
                self._feed.wait_done(self._attempt, self._read, left)
                self._read += 1
            except (EngineError, DeadlineError) as error:
                logger.warning("going on without an engine: %s", error)
                self.cancel(str(error))
                self._feed = None

    def cancel(self, cause: str) -> None:
        if self._feed:
            self._feed.cancel(self._attempt, cause)


class _Writing:
    """The engine rank's side of one move where its memory is written from here, if it takes part."""

    def __init__(self, staging: Staging, feed: HolderFeed | None, attempt: int, timeout_s: float) -> None:
        self._staging, self._feed = staging, feed
        self._attempt, self._timeout_s = attempt, timeout_s

    def wait_free(self, bucket: int) -> None:
        """The filling waits on the device."""

    def offer(self, bucket: int) -> None:
        if self._feed and not self._feed.dropped:
            self._staging.write(bucket)

    def finish(self, num_buckets: int) -> None:
        """Wait until everything is written, and say so."""
        self._staging.settle(self._timeout_s)
        if self._feed and not self._feed.dropped:
            self._feed.written(self._attempt)

    def cancel(self, cause: str) -> None:
        if self._feed:
            try:
                self._staging.settle(self._timeout_s)
            except Exception as error:  # noqa: BLE001 - the first cause is the one to tell
                logger.warning("what was begun may still be written: %s", error)
            self._feed.cancel(self._attempt, cause)
