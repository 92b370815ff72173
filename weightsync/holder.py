"""The process part that owns a GPU's (or CPU slot's) share of the bytes: arena, buckets, communicators."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weightsync.errors import DeadlineError, EngineError, StateError, WeightSyncError
from weightsync.feed import FeedTicket, HolderFeed
from weightsync.memory import BufferHandle, SharedBuffer
from weightsync.plan import Plan, Step, broadcast_groups
from weightsync.transports import Transport, transport_class

__all__ = ["Holder", "Prepared"]

logger = logging.getLogger("weightsync.holder")

Group = tuple[int, ...]
"""The holders of one communicator, ascending; a holder's rank is its place."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a holder has ready for one membership epoch.

    Attributes:
        plan_digest: as this holder computed it.
        arena: where its trainer rank publishes, if it serves one.
        ticket: how its engine rank reaches it, if it serves one.
        offers: rendezvous of the communicators whose first rank it is, by their members.
    """

    plan_digest: str
    arena: BufferHandle | None
    ticket: FeedTicket | None
    offers: Mapping[Group, str]


class Holder:
    """One member of every communicator; serves at most one trainer rank and one engine rank."""

    def __init__(self, name: str, host: str, transport: str = "gloo") -> None:
        """`host` is this host's address as other holders reach it."""
        self.name, self._host = name, host
        self._transport = transport_class(transport)
        self._plan: Plan | None = None
        self._plan_digest, self._index = "", -1
        self._group_of: dict[int, Group] = {}
        self._groups: dict[Group, Transport] = {}
        self._arena: SharedBuffer | None = None
        self._slots: tuple[SharedBuffer, ...] = ()
        self._feed: HolderFeed | None = None
        self._moving = threading.Lock()

    def prepare(self, plan: Plan, index: int) -> Prepared:
        """Take memory for `plan` as holder `index`, and leave what an earlier plan used.

        An arena whose bytes the new plan lays out the same way is kept with what it holds.
        Raises TransportError when the host's memory does not suffice.
        """
        self._leave()
        digest = plan.digest()
        trainers, engines = plan.members.trainers, dict(plan.members.engines)
        trainer = trainers.index(index) if index in trainers else -1
        self._keep_arena(plan, trainer)
        engine = next((name for name, holders in engines.items() if index in holders), None)
        if engine is not None:
            slots = [SharedBuffer.create(plan.max_bucket_nbytes) for _ in range(plan.slots)]
            self._slots = tuple(slots)
            handles = tuple(slot.handle for slot in slots)
            arena = self._arena.handle if self._arena else None
            self._feed = HolderFeed(self.name, engine, handles, arena, trainer)
        self._plan, self._plan_digest, self._index = plan, digest, index
        self._group_of = {
            r: g for r, g in broadcast_groups(plan.members).items() if index in g and len(g) > 1
        }
        self._groups = {group: self._transport() for group in sorted(set(self._group_of.values()))}
        offers = {g: transport.offer(self._host) for g, transport in self._groups.items() if g[0] == index}
        return Prepared(
            digest,
            self._arena.handle if self._arena else None,
            self._feed.ticket if self._feed else None,
            offers,
        )

    def join(self, offers: Mapping[Group, str], timeout_s: float) -> None:
        """Open every communicator, in the same order on every holder. Raises TransportError."""
        for group, transport in self._groups.items():
            transport.open(offers[group], group.index(self._index), len(group), timeout_s)

    def accept(self, timeout_s: float) -> None:
        """Wait for the engine rank's hello. Raises DeadlineError or WireError."""
        if self._feed:
            self._feed.accept(self._plan_digest, timeout_s)

    def warm_up(self) -> None:
        """Use every communicator once, so that no update pays its first use. Raises TransportError."""
        for group, transport in self._groups.items():
            for root in range(len(group)):
                transport.broadcast(torch.zeros(1, dtype=torch.uint8), root)
            transport.barrier()

    def move(self, attempt: int, feeding: bool, timeout_s: float) -> float:
        """Run the plan once: broadcast every bucket and, if `feeding`, hand it to the engine rank.

        Returns the seconds it took. Raises TransportError when the broadcast fails. An engine rank
        that fails or falls silent is left behind and does not hold the others up: its own `load`
        reports it.
        """
        plan = self._plan
        if plan is None:
            raise StateError(f"{self.name} has no plan: connect first")
        with self._moving:
            return self._run(plan, attempt, feeding, timeout_s)

    def _run(self, plan: Plan, attempt: int, feeding: bool, timeout_s: float) -> float:
        started = time.perf_counter()
        feed = _Feeding(self._feed if feeding else None, attempt, plan.slots, timeout_s / 2)
        try:
            for bucket in range(plan.num_buckets):
                slot = bucket % plan.slots
                feed.wait_free(bucket)
                for step in plan.bucket_steps(bucket):
                    self._broadcast(step, slot)
                feed.offer(bucket)
            feed.finish(plan.num_buckets)
        except WeightSyncError as error:
            feed.cancel(str(error))
            raise
        return time.perf_counter() - started

    def drop_engine(self) -> None:
        """Give the engine rank up, also while `move` waits for it."""
        if self._feed:
            self._feed.drop()

    def close(self) -> None:
        """Leave the communicators and free the memory."""
        self._leave()
        if self._arena:
            self._arena.close()
            self._arena = None
        self._plan = None

    def _broadcast(self, step: Step, slot: int) -> None:
        group = self._group_of.get(step.root)
        if group is None:
            return
        if step.root == self._index:
            assert self._arena is not None
            data = self._arena.tensor[step.arena_offset : step.arena_offset + step.nbytes]
        else:
            data = self._slots[slot].tensor[step.offset : step.offset + step.nbytes]
        self._groups[group].broadcast(data, group.index(step.root))

    def _keep_arena(self, plan: Plan, trainer: int) -> None:
        if self._arena is not None:
            old = self._plan
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
            for slot in self._slots:
                slot.close()
        self._group_of, self._groups, self._feed, self._slots = {}, {}, None, ()


class _Feeding:
    """The engine rank's side of one move; without a feed, or after its first failure, it does nothing."""

    def __init__(self, feed: HolderFeed | None, attempt: int, num_slots: int, timeout_s: float) -> None:
        self._feed, self._attempt, self._timeout_s = feed, attempt, timeout_s
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
                self._feed.wait_done(self._attempt, self._read, self._timeout_s)
                self._read += 1
            except (EngineError, DeadlineError) as error:
                logger.warning("going on without an engine: %s", error)
                self._feed = None

    def cancel(self, cause: str) -> None:
        if self._feed:
            self._feed.cancel(self._attempt, cause)
