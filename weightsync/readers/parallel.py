"""Several readers behind one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from weightsync.errors import DeadlineError, ReadError
from weightsync.readers.base import Read, Reader
from weightsync.readers.ways import way_of

if TYPE_CHECKING:
    from weightsync.memory.host import SharedBuffer
    from weightsync.protocol.handles import Offer


def open_reader(
    targets: Sequence[SharedBuffer], offers: Mapping[str, Offer], *, may_map: bool = True
) -> Reader:
    """Open a reader that fills `targets` from the peers in `offers`.

    With `may_map`, the reader maps memory of peers on this host. Other peers are read by their offer's
    protocol. Raises ReadError if a peer has ended, TransportError if Mooncake does not start.
    """
    from weightsync.readers.mapped import MappedReader, can_map

    by_way: dict[str, dict[str, Offer]] = {}
    for peer, offer in offers.items():
        by_way.setdefault("mapped" if may_map and can_map(offer) else offer.protocol, {})[peer] = offer
    readers: list[Reader] = []
    try:
        for way, its in by_way.items():
            make = MappedReader if way == "mapped" else way_of(way).has("READER")
            readers.append(make(targets, its))
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return ParallelReader(targets, offers, readers)


class ParallelReader:
    """Runs the readers of several ways in parallel. If one fails, all are closed."""

    def __init__(
        self, targets: Sequence[SharedBuffer], offers: Mapping[str, Offer], readers: Sequence[Reader]
    ) -> None:
        """Exactly one of `readers` reads each peer of `offers`."""
        self._targets, self._offers, self._readers = targets, offers, readers
        self.ways = {peer: way for reader in readers for peer, way in reader.ways.items()}

    def read(self, reads: Sequence[Read], timeout_s: float) -> dict[str, int]:
        """Run `reads`, as `Reader.read` says."""
        self._check(reads)
        try:
            return self._read([read for read in reads if read.nbytes], timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all readers, as `Reader.close` says."""
        for reader in self._readers:
            reader.close()

    def _check(self, reads: Sequence[Read]) -> None:
        """Raise ReadError for an unknown peer or target, or a range out of bounds."""
        for read in reads:
            if read.peer not in self._offers:
                raise ReadError(
                    read.peer, f"it made no offer; those that did: {', '.join(sorted(self._offers))}"
                )
            if not 0 <= read.target < len(self._targets):
                raise ReadError(read.peer, f"target {read.target} of {len(self._targets)} is to be filled")
            held, room = self._offers[read.peer].memory.nbytes, self._targets[read.target].handle.nbytes
            if not 0 <= read.source <= read.source + read.nbytes <= held:
                raise ReadError(read.peer, f"{read.nbytes} bytes from {read.source} on, of the {held} it has")
            if not 0 <= read.offset <= read.offset + read.nbytes <= room:
                raise ReadError(
                    read.peer,
                    f"{read.nbytes} bytes go to {read.offset} of target {read.target}, which has {room}",
                )

    def _read(self, reads: Sequence[Read], timeout_s: float) -> dict[str, int]:
        parts = [(reader, [read for read in reads if read.peer in reader.ways]) for reader in self._readers]
        parts = [(reader, its) for reader, its in parts if its]
        if len(parts) == 1:
            ((reader, its),) = parts
            return dict(reader.read(its, timeout_s))
        with ThreadPoolExecutor(max(len(parts), 1)) as threads:
            futures = [threads.submit(reader.read, its, timeout_s) for reader, its in parts]
            try:
                return self._gather(futures)
            except BaseException:
                self.close()  # ends the other reads
                raise

    def _gather(self, futures: Sequence[Future[Mapping[str, int]]]) -> dict[str, int]:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(isinstance(future.exception(), DeadlineError) for future in done):
            wait(futures)  # all have the same deadline, so each names its late peers now
        errors = [error for future in futures if future.done() and (error := future.exception())]
        for error in errors:
            if not isinstance(error, DeadlineError):
                raise error
        if late := [error for error in errors if isinstance(error, DeadlineError)]:
            missing = sorted(peer for error in late for peer in error.missing)
            raise DeadlineError("refill", missing, late[0].timeout_s)
        return {peer: nbytes for future in futures for peer, nbytes in future.result().items()}
