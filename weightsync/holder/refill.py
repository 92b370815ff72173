"""Reads a committed version bucket by bucket from the holders that keep it, several at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from weightsync.errors import DeadlineError, ReadError, TransportError, WeightSyncError
from weightsync.faults import strike
from weightsync.holder.refill_sink import Intake, Portion
from weightsync.holder.snapshots import LABEL_NBYTES, read_labels
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.messages import Kept, Label, Refilled
from weightsync.readers import Read, Reader, open_reader

__all__ = ["Refill"]

logger = logging.getLogger("weightsync.holder.refill")

_PATIENCE = 0.3
"""Of the time that an engine rank waits for a bucket, what one peer may take of it: others are to follow."""


class Refill:
    """One rank's reading. A peer that fails is left for the next that keeps the same part."""

    def __init__(self, kept: Kept, intake: Intake, direct: bool, timeout_s: float) -> None:
        """`timeout_s`: how long the engine rank waits for a bucket; `direct`: map memory of this host."""
        self._kept, self._intake, self._direct = kept, intake, direct
        self._timeout_s = timeout_s
        self._peers = {
            part: {f"{offer.holder}:{part}": offer for offer in offers} for part, offers in kept.parts.items()
        }
        self._scratch = SharedBuffer.create(LABEL_NBYTES * sum(map(len, self._peers.values())))
        self._targets = [*intake.targets, self._scratch]
        self._reader: Reader | None = None
        self._lock, self._stopped = threading.Lock(), ""
        self._nbytes: Counter[str] = Counter()
        self._ways: dict[str, str] = {}

    def run(self) -> Refilled:
        """Every bucket in, one after the other: while one is loaded, the next is read.

        Raises ReadError or DeadlineError, naming the holder, when nobody is left who keeps a part;
        TransportError when it was stopped.
        """
        begun = time.perf_counter()
        num_buckets = self._intake.num_buckets
        for bucket in range(num_buckets):
            self._intake.wait_free(bucket)
            target = bucket % (len(self._targets) - 1)
            portions = self._intake.portions(bucket)
            self._read_bucket(bucket, portions, target)
            struck = portions[bucket % len(portions)]
            data = self._targets[target].tensor[struck.offset : struck.offset + struck.nbytes]
            strike("refill", bucket=bucket, num_buckets=num_buckets, data=data)
            self._intake.land(bucket)
        self._check(self._open())  # what was read has not been replaced meanwhile
        self._intake.finish()
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

    def _read_bucket(self, bucket: int, portions: Sequence[Portion], target: int) -> None:
        while True:
            try:
                reader = self._open()
                reads = [self._read(bucket + i, portion, target) for i, portion in enumerate(portions)]
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
        peers = {peer: part for part, known in self._peers.items() for peer in known}
        found = read_labels(reader, [*peers], self._scratch, len(self._targets) - 1, self._patience)
        for peer, part in peers.items():
            wanted = Label(self._kept.version, self._kept.layout, part)
            if found[peer] != wanted:
                raise ReadError(peer, f"it keeps {found[peer] or 'nothing now'}, not {wanted}")

    def _read(self, turn: int, portion: Portion, target: int) -> Read:
        peers = [*self._peers[portion.part]]
        # In turn, so that several hosts serve at once.
        peer = peers[turn % len(peers)]
        return Read(peer, LABEL_NBYTES + portion.source, target, portion.offset, portion.nbytes)

    def _leave(self, peers: Iterable[str], error: WeightSyncError) -> None:
        """Go on without `peers`. Raises `error` when nobody else keeps what one of them does."""
        for peer in peers:
            part = next(number for number, known in self._peers.items() if peer in known)
            del self._peers[part][peer]
            if not self._peers[part]:
                if isinstance(error, ReadError):
                    raise ReadError(_holder(peer), error.cause) from error
                raise DeadlineError("refill", (_holder(peer),), self._patience) from error
            logger.warning("going on without %s: %s", peer, error)
        with self._lock:
            if self._reader:
                self._reader.close()
                self._reader = None


def _holder(peer: str) -> str:
    return peer.rpartition(":")[0]
