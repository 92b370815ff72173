"""The protocols, and a base class, for reading a peer's memory without asking its holder."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import TransportError

if TYPE_CHECKING:
    from weightsync.protocol.handles import Offer


@dataclass(frozen=True, slots=True)
class Read:
    """A read of `nbytes` bytes from `source` in `peer`'s buffer to `offset` in target number `target`."""

    peer: str
    source: int
    target: int
    offset: int
    nbytes: int


class Readable(Protocol):
    """Memory that a server sends. A `SharedBuffer` needs no such interface."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, nbytes: int) -> bytes | memoryview:
        """Return `nbytes` bytes from `start` on, within bounds. Only the server's thread calls this.

        The result must not change until it is sent, or be a view of memory that may change.
        """


class Server(Protocol):
    """Lets peers read one buffer until `close`. Reads are not protected against changes."""

    @property
    def offer(self) -> Offer:
        """The offer with which a peer reads the buffer."""

    def close(self) -> None:
        """Stop serving; a peer that reads over the network gets a ReadError. Safe to call twice."""


class Reader(Protocol):
    """Fills target buffers from peers, for a holder that refills or replicates."""

    @property
    def ways(self) -> Mapping[str, str]:
        """The way of each peer: "mapped" or the offer's protocol."""

    def read(self, reads: Sequence[Read], timeout_s: float) -> Mapping[str, int]:
        """Run `reads`, all peers in parallel. Returns bytes by peer.

        Called from one thread at a time. Raises ReadError with the peer; DeadlineError with the late peers;
        TransportError if the reader is closed during the call. After an error no more bytes are written to a
        target, so targets can be reused at once. The reader cannot be reused: open a new reader.
        """

    def close(self) -> None:
        """Close, also during a read in another thread. No byte is written afterwards. Safe to call twice."""


class ClosableReader(ABC):
    """A base of readers, which any thread may close: it ends the read, waits, then releases.

    `fd` (an eventfd) becomes readable at the end and stays so, for reads that poll.
    """

    def __init__(self) -> None:
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self._is_over = False
        self.fd = os.eventfd(0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the body as the only read. Raises TransportError after the end."""
        with self._reading:
            self.check()
            yield

    def check(self) -> None:
        """Raise TransportError after the end."""
        if self._is_over:
            raise TransportError("the reader is closed")

    def close(self) -> None:
        """End the read and release, as `Reader.close` says. The reading thread must not call this."""
        with self._lock:
            first, self._is_over = not self._is_over, True
            if first:
                os.eventfd_write(self.fd, 1)
        with self._reading:
            if first:
                self._release()
                os.close(self.fd)

    @abstractmethod
    def _release(self) -> None:
        """Release everything. Called once, when no read is running and none can start."""


def by_peer(reads: Iterable[Read]) -> dict[str, list[Read]]:
    """Group `reads` by peer, in order."""
    found: dict[str, list[Read]] = {}
    for read in reads:
        found.setdefault(read.peer, []).append(read)
    return found


def pieces(reads: Sequence[Read], max_nbytes: int) -> Iterator[Read]:
    """Join neighbouring `reads` of one peer, then cut reads to at most `max_nbytes`."""
    joined: list[Read] = []
    for read in reads:
        if joined and _follows(joined[-1], read):
            joined[-1] = replace(joined[-1], nbytes=joined[-1].nbytes + read.nbytes)
        else:
            joined.append(read)
    for first in joined:
        for at in range(0, first.nbytes, max_nbytes):
            nbytes = min(max_nbytes, first.nbytes - at)
            yield replace(first, source=first.source + at, offset=first.offset + at, nbytes=nbytes)


def _follows(before: Read, read: Read) -> bool:
    end = (before.target, before.source + before.nbytes, before.offset + before.nbytes)
    return end == (read.target, read.source, read.offset)
