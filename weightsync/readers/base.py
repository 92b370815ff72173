"""The protocols for reading a peer's memory without asking its holder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import ReadError

if TYPE_CHECKING:
    from weightsync.memory.host import SharedBuffer
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


def check_reads(reads: Iterable[Read], offers: Mapping[str, Offer], targets: Sequence[SharedBuffer]) -> None:
    """Raise ReadError for an unknown peer or target, or a range out of bounds."""
    for read in reads:
        if read.peer not in offers:
            raise ReadError(read.peer, f"it made no offer; those that did: {', '.join(sorted(offers))}")
        if not 0 <= read.target < len(targets):
            raise ReadError(read.peer, f"target {read.target} of {len(targets)} is to be filled")
        held, room = offers[read.peer].memory.nbytes, targets[read.target].handle.nbytes
        if not 0 <= read.source <= read.source + read.nbytes <= held:
            raise ReadError(read.peer, f"{read.nbytes} bytes from {read.source} on, of the {held} it has")
        if not 0 <= read.offset <= read.offset + read.nbytes <= room:
            raise ReadError(
                read.peer,
                f"{read.nbytes} bytes go to {read.offset} of target {read.target}, which has {room}",
            )


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
