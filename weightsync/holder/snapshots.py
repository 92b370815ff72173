"""Snapshots of committed versions in a holder's memory, which other holders read."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import torch

from weightsync.config import Ports
from weightsync.errors import ReadError, TransportError, WireError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.decoding import decoded
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Fingerprint, LiveDigest, Snapshot, SnapshotHeader, SnapshotPart
from weightsync.readers import Read, Reader, Server, choose_protocol, open_reader, serve

logger = logging.getLogger("weightsync.holder")

HEADER_NBYTES = 4096
"""Size of the snapshot header in front of a part. It is all zero while the part changes."""
_STEP_NBYTES = 64 << 20
"""Bytes of one read from another holder. Each read has a deadline, and a copy can be ended between reads."""

_headers = msgspec.json.Decoder(SnapshotHeader)
_Served: TypeAlias = tuple[SharedBuffer, Server]


class SnapshotContent(Protocol):
    """Weights that a `SnapshotStore` can save."""

    @property
    def nbytes(self) -> int: ...

    def save(self, to: torch.Tensor) -> None:
        """Copy everything to `to`, uint8[nbytes] on the host, and wait until it is there."""


class Copy:
    """The content of a buffer in host memory."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer

    @property
    def nbytes(self) -> int:
        return self._buffer.handle.nbytes

    @property
    def bytes(self) -> torch.Tensor:
        """The buffer: uint8[nbytes]."""
        return self._buffer.tensor

    def save(self, to: torch.Tensor) -> None:
        # In this thread, without torch's: other work in this process may need those. With more threads, an
        # engine on the same host is slower meanwhile.
        np.copyto(to.numpy(), self._buffer.tensor.numpy())


@dataclass(frozen=True, slots=True)
class Held:
    """A part in memory that this process maps; page-locked if there is a device."""

    holder: str
    way: Literal["own", "mapped"]
    buffer: SharedBuffer

    @property
    def header(self) -> SnapshotHeader | None:
        """The header now. `bytes` are valid if it is the same before and after reading them."""
        return _header(self.buffer.tensor[:HEADER_NBYTES])

    @property
    def bytes(self) -> torch.Tensor:
        """The part, without the header: uint8[nbytes]."""
        return _body(self.buffer)


@dataclass(frozen=True, slots=True)
class MappedParts:
    """Other holders' parts in memory that this process maps, by number."""

    _held: dict[int, list[Held]] = field(default_factory=dict)
    _mapping: threading.Lock = field(default_factory=threading.Lock)

    def map(self, offers: Mapping[int, Sequence[Offer]]) -> None:
        """Map and page-lock other holders' parts, so that no refill waits for it.

        `offers` has all memory of each part. Other mapped memory of these parts is unmapped. Raises
        PeerLostError if a holder is gone.
        """
        with self._mapping:  # a call that the driver has given up may still run
            for part, its in offers.items():
                self._map(part, its)

    def _map(self, part: int, offers: Sequence[Offer]) -> None:
        before = {held.buffer.handle: held for held in self._held.pop(part, ())}
        now = self._held[part] = []
        try:
            for offer in offers:
                if (held := before.pop(offer.memory, None)) is None:
                    held = Held(offer.holder, "mapped", SharedBuffer.open(offer.memory))
                    held.buffer.pin(in_parts=True)
                now.append(held)
        finally:
            for held in before.values():
                held.buffer.close()

    def find(self, header: SnapshotHeader) -> Held | None:
        """Return the part that `header` describes, if it is mapped."""
        return next((held for held in self._held.get(header.part, ()) if held.header == header), None)

    def close(self) -> None:
        """Unmap all parts, once nothing is mapped any more."""
        with self._mapping:
            while self._held:
                for held in self._held.popitem()[1]:
                    held.buffer.close()


class SnapshotStore:
    """A holder's snapshots: the latest version of each part.

    Parts of the next version are staged in spare memory, so that the snapshots stay. A call with a `turn` of
    `begin_staging` fills the spare memory; `keep` then exchanges the two.

    Attributes:
        mapped: the mapped snapshots of other holders on this host.
        received: the memory of `reserve_received`, by part. Use it while `receiving` the part.
    """

    def __init__(
        self, name: str, host: str, protocol: str, rdma_device: str, ports: Ports | None = None
    ) -> None:
        """`host` and `ports` are where it listens, see `serve`; for the rest see `choose_protocol`.

        Raises ConfigError when the protocol is not available on this host.
        """
        self.name, self._host, self._ports = name, host, ports
        self._protocol, self._rdma_device = choose_protocol(protocol, rdma_device), rdma_device
        self._shares: dict[int, _Served] = {}
        self._spares: dict[int, _Served] = {}
        self._deltas: dict[int, _Served] = {}
        self.received: dict[int, SharedBuffer] = {}
        self._kept: dict[int, SnapshotPart] = {}
        self._staged: dict[int, SnapshotPart] = {}
        self.mapped = MappedParts()
        self._changing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._reserving = set[int]()
        self._turn, self._closed = 0, False

    def reserve(self, part: int, nbytes: int) -> Offer:
        """Allocate the memory of a part, so that no update waits for it.

        A snapshot of that size stays. Raises TransportError when memory is short.
        """
        with self._changing[part]:
            if not _fits(self._shares, part, nbytes):
                self._reserving.add(part)
                try:
                    self._place(part, nbytes)
                finally:
                    self._reserving.discard(part)
            return self._shares[part][1].offer

    def reserve_spares(self, parts: Mapping[int, int]) -> dict[int, Sequence[Offer]]:
        """Allocate memory for two versions of each of `parts`, bytes by number, and free other spares.

        Returns the offers of both versions. A staging that still runs ends. Raises TransportError if memory
        is short.
        """
        turn = self.begin_staging()
        for part in self._spares.keys() - parts.keys():
            with self._changing[part]:
                self._staged.pop(part, None)
                _drop(self._spares, part)
                _drop(self._deltas, part)
                _drop_received(self.received, part)
        for part, nbytes in parts.items():
            self.reserve(part, nbytes)
            with self._changing[part]:
                if not _fits(self._spares, part, nbytes):
                    self._place(part, nbytes, turn)
        return {part: [taken[part][1].offer for taken in (self._shares, self._spares)] for part in parts}

    def begin_staging(self) -> int:
        """Return a new turn. Calls with an earlier turn end with a TransportError."""
        with self._changing[-1]:
            self._turn += 1
            return self._turn

    def snapshot(
        self,
        header: SnapshotHeader,
        expected: Fingerprint,
        part: SnapshotContent,
        turn: int = 0,
        live: LiveDigest | None = None,
    ) -> Offer:
        """Save `part` for others to read. `expected`: the fingerprint of the whole version in `header`.

        `live` is as in `SnapshotPart`. Raises TransportError when memory is short.
        """
        with self._changing[header.part]:
            buffer, server = self._place(header.part, part.nbytes, turn)
            part.save(_body(buffer))
            _write_header(buffer, header)
            self._known(turn)[header.part] = SnapshotPart(header, server.offer, expected, live)
        return server.offer

    def save_delta(self, header: SnapshotHeader, delta: SnapshotContent) -> Offer:
        """Save a delta for others to read, in place of the part's last one. `header.base` is set.

        Raises TransportError when memory is short.
        """
        part, nbytes = header.part, HEADER_NBYTES + delta.nbytes
        with self._changing[part]:
            self._check(0)
            if part not in self._deltas or self._deltas[part][0].handle.nbytes < nbytes:
                _drop(self._deltas, part)
                self._deltas[part] = self._serve(nbytes + nbytes // 4)  # most versions change as much
            buffer, server = self._deltas[part]
            _write_header(buffer, None)
            delta.save(_body(buffer)[: delta.nbytes])
            _write_header(buffer, header)
        return server.offer

    def reserve_received(self, part: int, nbytes: int) -> None:
        """Allocate memory for other holders' deltas of a part. It stays for later deltas.

        Raises TransportError when memory is short.
        """
        with self._changing[part]:
            self._check(0)
            held = self.received.get(part)
            if held is None or held.handle.nbytes < HEADER_NBYTES + nbytes:
                _drop_received(self.received, part)
                size = HEADER_NBYTES + nbytes + nbytes // 4  # most versions change as much
                self.received[part] = SharedBuffer.create(size, in_parts=True)

    def held(self, header: SnapshotHeader) -> Held | None:
        """Return the part that `header` describes, if it is saved, staged or mapped here."""
        return self.own(header) or self.mapped.find(header)

    def own(self, header: SnapshotHeader) -> Held | None:
        """Return the part that `header` describes, if it is saved or staged in this holder's memory."""
        here = [taken[header.part] for taken in (self._shares, self._spares) if header.part in taken]
        found = (Held(self.name, "own", buffer) for buffer, _ in here)
        return next((held for held in found if held.header == header), None)

    def committed(self, part: int) -> SnapshotHeader | None:
        """Return the header of a part's committed version, if one is saved. Ignores staged versions."""
        return kept.header if (kept := self._kept.get(part)) else None

    def parts(self, snapshot: Snapshot) -> Mapping[int, Held] | None:
        """Return all parts of `snapshot` if they are saved, staged or mapped here, else None."""
        found: dict[int, Held] = {}
        for part in snapshot.parts:
            held = self.held(SnapshotHeader(snapshot.version, snapshot.layout, part))
            if held is None:
                return None
            found[part] = held
        return found

    def replicate(self, snapshot_part: SnapshotPart, timeout_s: float, turn: int = 0) -> Offer:
        """Copy another holder's snapshot. `timeout_s` is for each 64 MiB.

        Raises ReadError or DeadlineError, naming that holder.
        """
        with self.receiving(snapshot_part, turn) as (buffer, offer):
            nbytes = len(_body(buffer))
            self.fetch(snapshot_part.offer, snapshot_part.header, nbytes, buffer, timeout_s, turn)
        return offer

    @contextmanager
    def receiving(self, snapshot_part: SnapshotPart, turn: int = 0) -> Iterator[tuple[SharedBuffer, Offer]]:
        """Yield memory for another holder's part, behind a header, and how it is read.

        It is served once the body ends without an error.
        """
        header, nbytes = snapshot_part.header, snapshot_part.offer.memory.nbytes - HEADER_NBYTES
        with self._changing[header.part]:
            buffer, server = self._place(header.part, nbytes, turn)
            yield buffer, server.offer
            _write_header(buffer, header)
            self._known(turn)[header.part] = replace(snapshot_part, offer=server.offer)

    def release(self, header: SnapshotHeader) -> None:
        """Free the memory of a part, unless it holds something newer or versions are staged there."""
        part = header.part
        with self._changing[part]:
            kept = self._kept.get(part)
            if part in self._shares and part not in self._spares and (not kept or kept.header == header):
                self._kept.pop(part, None)
                _drop(self._shares, part)

    def keep(self, version: int) -> None:
        """Make the staged parts of `version` the snapshots. Snapshots of parts without spare memory go."""
        for part in [*self._shares]:
            with self._changing[part]:
                staged = self._staged.pop(part, None)
                if staged and staged.header.version == version:
                    self._shares[part], self._spares[part] = self._spares[part], self._shares[part]
                    self._kept[part] = staged
                elif part not in self._spares:
                    self._kept.pop(part, None)
                    _drop(self._shares, part)

    def memory(self, part: int) -> Sequence[torch.Tensor]:
        """Return where versions of a part are saved, without headers: each uint8[nbytes]."""
        return [_body(taken[part][0]) for taken in (self._shares, self._spares) if part in taken]

    def snapshots(self) -> list[SnapshotPart]:
        """Return all complete parts, after pending writes finish. Staged and damaged ones are left out.

        Memory that `reserve` allocates holds nothing, and is not waited for.
        """
        for part, changing in [*self._changing.items()]:
            if part not in self._reserving:
                with changing:
                    pass
        return [part for part in [*self._kept.values()] if self.own(part.header)]

    def fetch(
        self,
        offer: Offer,
        wanted: SnapshotHeader,
        nbytes: int,
        buffer: SharedBuffer,
        timeout_s: float,
        turn: int = 0,
    ) -> None:
        """Read `nbytes` of another holder's part or delta, and its header, into `buffer`.

        Raises as `replicate`. Raises ReadError if the header is not `wanted`; `buffer` then has none.
        """
        reader = open_reader([buffer], {offer.holder: offer})
        try:
            for at in range(HEADER_NBYTES, HEADER_NBYTES + nbytes, _STEP_NBYTES):
                self._check(turn)
                step = min(_STEP_NBYTES, HEADER_NBYTES + nbytes - at)
                reader.read([Read(offer.holder, at, 0, at, step)], timeout_s)
            # The header is read after the bytes, so it proves their version if it is unchanged.
            found = read_headers(reader, [offer.holder], buffer, 0, timeout_s)[offer.holder]
        finally:
            reader.close()
        if found != wanted:
            _write_header(buffer, None)
            raise ReadError(offer.holder, f"it holds {found or 'no snapshot'}, not {wanted}")

    def close(self) -> None:
        """Free the memory, once nothing is copied there or allocated any more. Later calls are refused."""
        self._closed = True
        for part, changing in [*self._changing.items()]:
            with changing:
                for taken in (self._shares, self._spares, self._deltas):
                    _drop(taken, part)
                _drop_received(self.received, part)
        self.mapped.close()

    def _check(self, turn: int) -> None:
        if self._closed:
            raise TransportError(f"{self.name} is closed")
        if turn and turn != self._turn:
            raise TransportError(f"{self.name} stages something newer")

    def _known(self, turn: int) -> dict[int, SnapshotPart]:
        return self._staged if turn else self._kept

    def _place(self, part: int, nbytes: int, turn: int = 0) -> _Served:
        """Return the buffer and server for a part, with an empty header. With a `turn`, the spare ones."""
        self._check(turn)
        self._known(turn).pop(part, None)
        taken = self._spares if turn else self._shares
        if not _fits(taken, part, nbytes):
            _drop(taken, part)
            taken[part] = self._serve(HEADER_NBYTES + nbytes)
        _write_header(taken[part][0], None)
        return taken[part]

    def _serve(self, nbytes: int) -> _Served:
        buffer = SharedBuffer.create(nbytes, in_parts=True)
        try:
            server = serve(buffer, self.name, self._host, self._protocol, self._rdma_device, self._ports)
        except BaseException:
            buffer.close()
            raise
        return buffer, server


def _drop(taken: dict[int, _Served], part: int) -> None:
    if part in taken:
        buffer, server = taken.pop(part)
        server.close()
        buffer.close()


def _drop_received(received: dict[int, SharedBuffer], part: int) -> None:
    if held := received.pop(part, None):
        held.close()


def _fits(taken: Mapping[int, _Served], part: int, nbytes: int) -> bool:
    return part in taken and taken[part][0].handle.nbytes == HEADER_NBYTES + nbytes


def read_headers(
    reader: Reader, peers: Sequence[str], scratch: SharedBuffer, target: int, timeout_s: float
) -> Mapping[str, SnapshotHeader | None]:
    """Return each peer's header now, or None. `scratch` is the reader's target number `target`."""
    reads = [Read(peer, 0, target, i * HEADER_NBYTES, HEADER_NBYTES) for i, peer in enumerate(peers)]
    reader.read(reads, timeout_s)
    return {
        peer: _header(scratch.tensor[i * HEADER_NBYTES : (i + 1) * HEADER_NBYTES])
        for i, peer in enumerate(peers)
    }


def encode_header(header: SnapshotHeader | None) -> bytes:
    """Encode the header before a part: `HEADER_NBYTES` bytes, all zero without a `header`."""
    return (msgspec.json.encode(header) if header else b"").ljust(HEADER_NBYTES, b"\0")


def _header(memory: torch.Tensor) -> SnapshotHeader | None:
    """Return the header, None if there is none, or if it is damaged."""
    data = memory.numpy().tobytes().rstrip(b"\0")
    try:
        return decoded(_headers.decode, data, "a header") if data else None
    except WireError:
        return None


def _write_header(buffer: SharedBuffer, header: SnapshotHeader | None) -> None:
    buffer.tensor[:HEADER_NBYTES] = torch.frombuffer(bytearray(encode_header(header)), dtype=torch.uint8)


def _body(buffer: SharedBuffer) -> torch.Tensor:
    return buffer.tensor[HEADER_NBYTES:]
