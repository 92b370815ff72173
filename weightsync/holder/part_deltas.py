"""Makes deltas of the holder's own staged parts, and applies deltas of other holders' parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from msgspec.structs import replace

from weightsync.deltas.changes import Changes, Span
from weightsync.deltas.device_changes import CodingMemory, DeviceCoder
from weightsync.deltas.tiles import Bytes
from weightsync.errors import ReadError, TransportError, WireError
from weightsync.holder.snapshots import HEADER_NBYTES, Copy, Held, SnapshotContent, SnapshotStore
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Plan
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Delta, SnapshotHeader, SnapshotPart

logger = logging.getLogger("weightsync.holder")


class _Written(Protocol):
    """Changes, as bytes."""

    @property
    def nbytes(self) -> int: ...
    def write(self, to: Bytes) -> None: ...


class _Coder(Protocol):
    """Finds and applies the changes of a part: see `DeviceCoder`."""

    def between(self, old: torch.Tensor, new: torch.Tensor) -> _Written: ...
    def rebuild(self, data: torch.Tensor, base: torch.Tensor, to: torch.Tensor) -> None: ...


@dataclass(slots=True)
class ComparedContent:
    """The content of a part, compared with the committed version while it is saved.

    Attributes:
        changes: after `save`, the changes, and the seconds to find them.
    """

    content: SnapshotContent
    base: Held
    coder: _Coder
    changes: tuple[_Written, float] | None = None

    @property
    def nbytes(self) -> int:
        return self.content.nbytes

    def save(self, to: torch.Tensor) -> None:
        if isinstance(self.coder, DeviceCoder) and isinstance(self.content, Copy):
            # The new version crosses to the GPU anyway. Copied back from there, it costs no time: by a thread
            # of the host 16 GB would take 1.8 s.
            began = time.perf_counter()
            changes: _Written = self.coder.between(self.base.bytes, self.content.bytes, to)
        else:
            self.content.save(to)
            began = time.perf_counter()
            changes = self.coder.between(self.base.bytes, to)
        self.changes = changes, time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _HostCoder:
    """Does what `DeviceCoder` does in one thread, without a GPU."""

    spans: Sequence[Span]

    def between(self, old: torch.Tensor, new: torch.Tensor) -> Changes:
        return Changes.between(self.spans, old.numpy(), new.numpy())

    def rebuild(self, data: torch.Tensor, base: torch.Tensor, to: torch.Tensor) -> None:
        changes, memory = Changes.decode(self.spans, data.numpy()), to.numpy()
        memory[:] = base.numpy()
        changes.apply(memory)


@dataclass(slots=True)
class _Content:
    """Changes as the content of a store's memory, and the seconds to write them."""

    changes: _Written
    nbytes: int
    seconds: float = 0.0

    def save(self, to: torch.Tensor) -> None:
        began = time.perf_counter()
        self.changes.write(to.numpy())
        self.seconds = time.perf_counter() - began


class PartDeltas:
    """Makes and applies deltas of parts of one plan, in the memory of a snapshot store.

    Snapshots are in memory of the host. If the holder has a GPU, they are compared and rebuilt there.
    """

    def __init__(self, plan: Plan, store: SnapshotStore, on_device: bool) -> None:
        """`on_device`: use the current GPU, from the first delta on, if it has the memory."""
        self._plan, self._store, self._on_device = plan, store, on_device
        self._spans, self._coder = cache(self._find_spans), cache(self._make_coder)

    def compared(self, header: SnapshotHeader, content: SnapshotContent) -> ComparedContent | None:
        """Return `content` in a form that `save` compares with the part's committed version.

        Returns None if no version with this layout is here. Allocates memory for the first one.
        """
        base = self._store.committed(header.part)
        if base is None or base.layout != header.layout or (held := self._store.own(base)) is None:
            return None
        return ComparedContent(content, held, self._coder(header.part))

    def make(self, header: SnapshotHeader, compared: ComparedContent) -> Delta | None:
        """Save the changes of the staged part, unless they are as long as the tensors.

        Returns None if the committed version was replaced. `Delta.seconds` leave out the first delta's
        allocation of memory. Raises TransportError when memory is short.
        """
        base, offer = self._store.committed(header.part), None
        if base is None or compared.base.header != base or compared.changes is None:
            return None
        changes, seconds = compared.changes
        content = _Content(changes, changes.nbytes)
        if content.nbytes < sum(span.nbytes for span in self._spans(header.part)):
            offer = self._store.save_delta(replace(header, base=base.version), content)
        return Delta(base.version, offer, content.nbytes, seconds + content.seconds)

    def reserve(self, part: int, delta: Delta) -> None:
        """Allocate the memory that `copy` of a part needs. Raises TransportError when memory is short."""
        self._coder(part)
        self._store.reserve_received(part, delta.nbytes)

    def copy(self, part: SnapshotPart, delta: Delta, timeout_s: float, turn: int) -> Offer | None:
        """Stage another holder's part: this holder's version `delta.base`, and the changes since.

        Call `reserve` before. Returns None, and stages nothing, if that version is not committed here. Raises
        as `SnapshotStore.fetch`, also ReadError for a damaged delta.
        """
        header = replace(part.header, version=delta.base)
        # If the call that commits a version was lost, the version is in the memory that is filled here.
        base = self._store.own(header) if self._store.committed(header.part) == header else None
        if base is None or delta.offer is None:
            return None
        wanted = replace(part.header, base=delta.base)
        try:
            with self._store.receiving(part, turn) as (buffer, offer):
                received = self._store.received[part.header.part]
                self._store.fetch(delta.offer, wanted, delta.nbytes, received, timeout_s, turn)
                data = received.tensor[HEADER_NBYTES : HEADER_NBYTES + delta.nbytes]
                self._write(part, base, data, buffer)
        except WireError as error:
            raise ReadError(delta.offer.holder, str(error)) from error
        return offer

    def _write(self, part: SnapshotPart, base: Held, data: torch.Tensor, buffer: SharedBuffer) -> None:
        header = base.header
        self._coder(part.header.part).rebuild(data, base.bytes, buffer.tensor[HEADER_NBYTES:])
        if header is None or base.header != header:
            raise WireError(f"part {part.header.part} was replaced while a delta of it was applied")

    def _make_coder(self, part: int) -> _Coder:
        spans = self._spans(part)
        try:
            return DeviceCoder(spans, self._memory) if self._on_device else _HostCoder(spans)
        except (TransportError, torch.OutOfMemoryError) as error:
            logger.warning("[%s] makes and uses deltas in one thread: %s", self._store.name, error)
            return _HostCoder(spans)

    @cached_property
    def _memory(self) -> CodingMemory:
        return CodingMemory()

    def _find_spans(self, part: int) -> Sequence[Span]:
        sizes = [
            (piece, self._plan.tensors[piece.tensor].itemsize) for piece in self._plan.trainer_pieces(part)
        ]
        return [Span(piece.send_buffer_offset, piece.box.numel * size, size) for piece, size in sizes]
