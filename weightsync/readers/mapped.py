"""Reads memory of a process on this host by mapping it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from weightsync.errors import DeadlineError, PeerLostError, ReadError
from weightsync.memory.host import SharedBuffer, num_threads, open_memory
from weightsync.protocol.handles import Offer
from weightsync.readers.base import ClosableReader, Read, by_peer, pieces

PIECE_NBYTES = 16 << 20
"""The most bytes of one copy. A DeadlineError is late by at most the duration of one copy."""
MAX_THREADS = 4

Bytes = npt.NDArray[np.uint8]


def can_map(offer: Offer) -> bool:
    """Return True if this process may map the offered memory. Needs the same host, and access through /proc.

    Only the memory proves the host: the memory's name is random, while cloned machines and containers may
    have equal boot ids, namespaces, process ids and hostnames. False also if the offering process is gone.
    """
    # Other hosts may have a file of this name. Memory without a name is only served over the network.
    if offer.memory.is_file or not offer.memory.name:
        return False
    try:
        os.close(open_memory(offer.memory, os.O_RDONLY))
    except PeerLostError:
        return False
    return True


class MappedReader(ClosableReader):
    """The reader of way "mapped": copies between two mappings, with a few threads.

    A peer that dies or stops does not matter: the memory exists as long as it is mapped.
    """

    def __init__(self, targets: Sequence[SharedBuffer], offers: Mapping[str, Offer]) -> None:
        """Map every peer's memory, read-only. Raises ReadError if a peer is gone."""
        self.ways = dict.fromkeys(offers, "mapped")
        self._targets: list[Bytes] = [target.tensor.numpy() for target in targets]
        self._sources = {peer: _map(peer, offer) for peer, offer in offers.items()}
        super().__init__()
        self._num_threads = num_threads(MAX_THREADS)

    def read(self, reads: Sequence[Read], timeout_s: float) -> dict[str, int]:
        """Run `reads`, as `Reader.read` says."""
        with self.reading(), ThreadPoolExecutor(self._num_threads) as threads:
            deadline = time.monotonic() + timeout_s
            found = by_peer(reads)
            cut = [piece for its in found.values() for piece in pieces(its, PIECE_NBYTES)]
            copies = {threads.submit(self._copy, piece, deadline): piece.peer for piece in cut}
            try:
                self._finish(copies, deadline, timeout_s)
            finally:
                threads.shutdown(cancel_futures=True)
        return {peer: sum(read.nbytes for read in its) for peer, its in found.items()}

    def _copy(self, piece: Read, deadline: float) -> bool:
        """Copy one piece. Returns False, without copying, after the end or the deadline."""
        if self._is_over or time.monotonic() > deadline:
            return False
        target = self._targets[piece.target][piece.offset : piece.offset + piece.nbytes]
        np.copyto(target, self._sources[piece.peer][piece.source : piece.source + piece.nbytes])
        return True

    def _finish(self, copies: Mapping[Future[bool], str], deadline: float, timeout_s: float) -> None:
        done, pending = wait(copies, max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        if late := [*pending, *(copy for copy in done if not copy.result())]:
            self.check()
            raise DeadlineError("refill", sorted({copies[copy] for copy in late}), timeout_s)

    def _release(self) -> None:
        self._targets.clear()
        self._sources.clear()


def _map(peer: str, offer: Offer) -> Bytes:
    try:
        fd = open_memory(offer.memory, os.O_RDONLY)
        try:
            # Not populated: a rank reads only its share, and threads touch pages in parallel.
            view = mmap.mmap(fd, max(offer.memory.nbytes, 1), mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
    except (PeerLostError, ValueError) as error:  # ValueError: the memory is smaller than offered
        raise ReadError(peer, str(error)) from error
    return np.frombuffer(view, dtype=np.uint8)
