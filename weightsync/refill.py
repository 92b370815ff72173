"""Reads a committed version bucket by bucket from the holders that keep it, several at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weightsync.errors import DeadlineError, ReadError, TransportError, WeightSyncError
from weightsync.faults import armed, strike
from weightsync.keeper import LABEL_NBYTES, Label, read_labels
from weightsync.memory import SharedBuffer
from weightsync.outlet import Outlet
from weightsync.plan import Plan, Step
from weightsync.readers import Offer, Read, Reader, open_reader
from weightsync.staging import Staging

__all__ = ["Kept", "Refill", "Refilled", "strike_bucket"]

logger = logging.getLogger("weightsync.refill")

_PATIENCE = 0.3
"""Of the time that an engine rank waits for a bucket, what one peer may take of it: others are to follow."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed version, and who keeps each trainer's share of it.

    Attributes:
        layout: `Plan.content` of the plan by which the shares lie.
        shares: offers by trainer rank; the first is of its own holder, mirrors follow.
    """

    version: int
    layout: str
    shares: Mapping[int, Sequence[Offer]]


@dataclass(frozen=True, slots=True)
class Refilled:
    """What one rank read: bytes by holder, the way that each was read, and the seconds it took."""

    bytes_from: Mapping[str, int]
    ways: Mapping[str, str]
    seconds: float


class Refill:
    """One rank's reading. A peer that fails is left for the next that keeps the same share."""

    def __init__(self, plan: Plan, kept: Kept, staging: Staging, direct: bool, timeout_s: float) -> None:
        """`timeout_s`: how long the engine rank waits for a bucket; `direct`: map memory of this host."""
        self._plan, self._kept, self._staging, self._direct = plan, kept, staging, direct
        self._timeout_s = timeout_s
        self._peers = {
            trainer: {f"{offer.holder}:{trainer}": offer for offer in offers}
            for trainer, offers in kept.shares.items()
        }
        self._scratch = SharedBuffer.create(LABEL_NBYTES * sum(map(len, self._peers.values())))
        self._targets = [*staging.targets(), self._scratch]
        self._reader: Reader | None = None
        self._lock, self._stopped = threading.Lock(), ""
        self._nbytes: Counter[str] = Counter()
        self._ways: dict[str, str] = {}

    def run(self, outlet: Outlet) -> Refilled:
        """Every bucket into the staging's slots, and out: while one is loaded, the next is read.

        Raises ReadError or DeadlineError, naming the holder, when nobody is left who keeps a share;
        TransportError when it was stopped.
        """
        begun = time.perf_counter()
        for bucket in range(self._plan.num_buckets):
            outlet.wait_free(bucket)
            target = bucket % (len(self._targets) - 1)
            self._read_bucket(bucket, target)
            strike_bucket("refill", self._plan, bucket, -1, partial(self._part, target))
            self._staging.put(bucket, self._timeout_s)
            outlet.offer(bucket)
        self._check(self._open())  # what was read has not been replaced meanwhile
        outlet.finish(self._plan.num_buckets)
        return Refilled(dict(self._nbytes), dict(self._ways), time.perf_counter() - begun)

    def stop(self, cause: str) -> None:
        """End a `read`, from any thread."""
        with self._lock:
            self._stopped = cause
            if self._reader:
                self._reader.close()

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._scratch.close()

    def _part(self, target: int, step: Step) -> torch.Tensor:
        return self._targets[target].tensor[step.offset : step.offset + step.nbytes]

    def _read_bucket(self, bucket: int, target: int) -> None:
        steps = self._plan.bucket_steps(bucket)
        while True:
            try:
                reader = self._open()
                done = reader.read([self._read(step, target) for step in steps], self._patience)
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
        reader = open_reader(self._targets, offers, direct=self._direct)
        try:
            self._check(reader)
        except WeightSyncError:
            reader.close()
            raise
        with self._lock:
            self._reader = reader
        self._ways |= {_holder(peer): way for peer, way in reader.ways.items()}
        return reader

    def _check(self, reader: Reader) -> None:
        peers = {peer: trainer for trainer, known in self._peers.items() for peer in known}
        found = read_labels(reader, [*peers], self._scratch, len(self._targets) - 1, self._patience)
        for peer, trainer in peers.items():
            wanted = Label(self._kept.version, self._kept.layout, trainer)
            if found[peer] != wanted:
                raise ReadError(peer, f"it keeps {found[peer] or 'nothing now'}, not {wanted}")

    def _read(self, step: Step, target: int) -> Read:
        peers = [*self._peers[step.trainer]]
        # In turn, so that several hosts serve at once.
        peer = peers[step.bucket % len(peers)]
        return Read(peer, LABEL_NBYTES + step.arena_offset, target, step.offset, step.nbytes)

    def _leave(self, peers: Iterable[str], error: WeightSyncError) -> None:
        """Go on without `peers`. Raises `error` when nobody else keeps what one of them does."""
        for peer in peers:
            trainer = next(t for t, known in self._peers.items() if peer in known)
            del self._peers[trainer][peer]
            if not self._peers[trainer]:
                if isinstance(error, ReadError):
                    raise ReadError(_holder(peer), error.cause) from error
                raise DeadlineError("refill", (_holder(peer),), self._patience) from error
            logger.warning("going on without %s: %s", peer, error)
        with self._lock:
            if self._reader:
                self._reader.close()
                self._reader = None


def strike_bucket(at: str, plan: Plan, bucket: int, index: int, view: Callable[[Step], torch.Tensor]) -> None:
    """Faults that are armed here; what corrupts finds the `view` of a step that came from elsewhere.

    `index` is the holder's own, whose share is not to be changed at its source.
    """
    data = None
    if armed():
        came = [step for step in plan.bucket_steps(bucket) if step.root != index and step.nbytes]
        data = view(came[bucket % len(came)]) if came else None
    strike(at, bucket=bucket, num_buckets=plan.num_buckets, data=data)


def _holder(peer: str) -> str:
    return peer.rpartition(":")[0]
