"""How bytes get out of a peer's memory without a word from its holder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weightsync.errors import ReadError

if TYPE_CHECKING:
    from weightsync.memory.host import SharedBuffer
    from weightsync.protocol.handles import Offer

__all__ = ["Read", "Reader", "Server", "by_peer", "check_reads", "host_id", "pieces"]


@dataclass(frozen=True, slots=True)
class Read:
    """`nbytes` bytes of `peer`'s buffer from `source` on, to target number `target` from `offset` on."""

    peer: str
    source: int
    target: int
    offset: int
    nbytes: int


class Server(Protocol):
    """Lets one buffer be read until it is closed. Its bytes must not change while a peer may read them."""

    @property
    def offer(self) -> Offer:
        """What a peer needs to read the buffer."""

    def close(self) -> None:
        """Stop; who is reading gets a ReadError. Safe to call twice."""


class Reader(Protocol):
    """Fills target buffers from peers."""

    @property
    def ways(self) -> Mapping[str, str]:
        """How each peer is read: "direct" or its offer's protocol."""

    def read(self, reads: Sequence[Read], timeout_s: float) -> Mapping[str, int]:
        """Do `reads`, all peers at once; returns the bytes of each. Called from one thread at a time.

        Raises ReadError, which names the peer; DeadlineError, which names those that were waited for;
        TransportError when the reader is closed meanwhile. Whatever it raises, no byte lands in a target
        afterwards, so that they can be used again at once; the reader cannot: open a new one.
        """

    def close(self) -> None:
        """End, also a read in another thread; no byte lands once this has returned. Safe to call twice."""


def host_id() -> str:
    """The same text in two processes that can map each other's memory through /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def check_reads(reads: Iterable[Read], offers: Mapping[str, Offer], targets: Sequence[SharedBuffer]) -> None:
    """Raises ReadError for the first that names an unknown peer, or leaves its buffer or its target."""
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
    """`reads` of each peer, in their order."""
    found: dict[str, list[Read]] = {}
    for read in reads:
        found.setdefault(read.peer, []).append(read)
    return found


def pieces(reads: Sequence[Read], max_nbytes: int) -> Iterator[Read]:
    """`reads` of one peer with neighbours joined, then cut to `max_nbytes` at most."""
    for _, run in groupby(_numbered(reads), key=lambda item: item[0]):
        joined = [read for _, read in run]
        first, total = joined[0], sum(read.nbytes for read in joined)
        for at in range(0, total, max_nbytes):
            nbytes = min(max_nbytes, total - at)
            yield Read(first.peer, first.source + at, first.target, first.offset + at, nbytes)


def _numbered(reads: Sequence[Read]) -> Iterator[tuple[int, Read]]:
    """Each with the number of the run of neighbours that it belongs to."""
    run, before = 0, None
    for read in reads:
        if before and not _follows(before, read):
            run += 1
        yield run, read
        before = read


def _follows(before: Read, read: Read) -> bool:
    end = (before.target, before.source + before.nbytes, before.offset + before.nbytes)
    return end == (read.target, read.source, read.offset)
