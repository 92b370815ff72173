"""Lets other holders read an engine rank's live memory, while nothing writes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from weightsync.config import Ports
from weightsync.errors import StateError
from weightsync.holder.flat_snapshot import FlatSnapshot
from weightsync.holder.snapshots import HEADER_NBYTES, encode_header
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import SnapshotHeader
from weightsync.readers import Server, serve_unmapped
from weightsync.readers.zeromq_server import CHUNK_NBYTES


class LiveSnapshot:
    """Live memory behind a snapshot header, which a server reads through a small host buffer.

    On a device, copies run on a separate stream, so the engine continues.
    """

    def __init__(self, flat: FlatSnapshot, header: SnapshotHeader) -> None:
        self._flat, self._header = flat, encode_header(header)
        self._bounce = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, pin_memory=flat.is_on_device)
        self._stream: torch.cuda.Stream | None = None
        if flat.is_on_device:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES + self._flat.nbytes

    def read(self, start: int, nbytes: int) -> bytes:
        """Return at most `CHUNK_NBYTES` bytes."""
        first = max(start, HEADER_NBYTES)
        part = self._bounce[: max(0, start + nbytes - first)]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._flat.copy_to(part, first - HEADER_NBYTES)
        if self._stream:
            self._stream.synchronize()
        # The header is taken last, so it is zero if something wrote the bytes during the copy.
        return self._header[start : start + nbytes] + part.numpy().tobytes()

    def clear(self) -> None:
        """Make the header zero. Whoever read bytes, and reads it next, knows that they are not to be used."""
        self._header = encode_header(None)


class LiveSource:
    """Serves one engine rank's live memory, from an offer until a write or a withdrawal.

    Attempts order the driver's calls, of which some may arrive late: an offer is refused once a write or a
    withdrawal of a later attempt has begun.
    """

    def __init__(self, name: str, host: str, ports: Ports | None, protocol: str = "zeromq") -> None:
        self._name, self._host, self._ports, self._protocol = name, host, ports, protocol
        self._lock = threading.Lock()
        self._served: tuple[LiveSnapshot, SnapshotHeader, Server] | None = None
        self._is_whole, self._num_ends = False, 0
        self._newest = self._offered = 0

    def offer(self, header: SnapshotHeader, flat: FlatSnapshot | None, attempt: int) -> Offer:
        """Serve `flat`, whose content `header` describes, over ZeroMQ. Returns the offer to readers.

        Must not overlap with `writing`. Raises StateError if this process has not seen the end of the last
        write or of a later write; TransportError or ConfigError if the server does not start.
        """
        with self._lock:
            if flat is None or not self._is_whole or attempt <= self._newest:
                raise StateError(f"{self._name} does not know that its engine rank holds {header}")
            self._offered = max(self._offered, attempt)
            if self._served and self._served[1] != header:
                self._close()
            if self._served is None:
                memory = LiveSnapshot(flat, header)
                server = serve_unmapped(memory, self._name, self._host, self._ports, self._protocol)
                self._served = memory, header, server
            return self._served[2].offer

    def withdraw(self, attempt: int) -> None:
        """Stop serving, unless there was an offer of a later attempt. No read runs afterwards."""
        with self._lock:
            self._newest = max(self._newest, attempt)
            if attempt > self._offered:
                self._close()

    @contextmanager
    def writing(self, attempt: int) -> Iterator[None]:
        """Stop serving while the body writes the memory, which is whole if the body ends without an error."""
        number = self.end(attempt)
        yield
        with self._lock:
            self._is_whole = number == self._num_ends

    def end(self, attempt: int = 0) -> int:
        """Stop serving before the memory is written in `attempt`, or unmapped.

        From then on, the content of the memory is unknown. Returns the number of such calls.
        """
        with self._lock:
            self._is_whole, self._newest, self._offered = False, attempt, 0
            self._num_ends += 1
            self._close()
            return self._num_ends

    def _close(self) -> None:
        if self._served:
            memory, _, server = self._served
            memory.clear()  # first, since a read may be under way
            server.close()
            self._served = None
