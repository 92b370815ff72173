"""The host memory that a holder sends from: a buffer of its own, or mapped checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import Protocol, TypeAlias

import torch

from weightsync.errors import StateError
from weightsync.holder.snapshots import Copy, SnapshotContent
from weightsync.holder.trainer_parts import Part
from weightsync.memory.host import SharedBuffer, map_pages, num_threads
from weightsync.plan import MAPPED, Box, Piece, Plan, Segment
from weightsync.plan.plan import by_tensor
from weightsync.protocol.handles import BufferHandle, HostExport

__all__ = [
    "Bounce",
    "MappedSendBuffer",
    "SendBuffer",
    "Sent",
    "send_buffer_for",
    "snapshot_content",
    "written",
]


class Sent(Protocol):
    """`nbytes` that belong at `offset` of a slot."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def copy(self, target: torch.Tensor) -> None:
        """To `target`, uint8[nbytes] in host memory; the calls of several threads go on beside each other."""


class Bounce:
    """A buffer for each slot, which threads fill while another is copied to the device.

    What is sent need not be page-locked itself then, which takes longer than sending it once.
    """

    def __init__(self, num_slots: int, nbytes: int) -> None:
        """`nbytes`: how far apart in a slot the first and the last byte of a bucket lie at most."""
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_slots)]
        self._threads = ThreadPoolExecutor(num_threads(8), "bounce")

    def send(self, bucket: int, parts: Sequence[Sent], slot: torch.Tensor) -> None:
        """Begin to copy `parts` to `slot` on the current stream. What had the slot before has arrived."""
        buffer, first = self._buffers[bucket % len(self._buffers)], min(part.offset for part in parts)
        places = [buffer[part.offset - first :][: part.nbytes] for part in parts]
        copied = self._threads.map(lambda part, place: part.copy(place), parts, places)
        for part, place, _ in zip(parts, places, copied, strict=True):
            slot[part.offset : part.offset + part.nbytes].copy_(place, non_blocking=True)

    def close(self) -> None:
        """Give the memory back. Nothing may be on its way."""
        self._threads.shutdown()
        self._buffers = []


PART_NBYTES = 4 << 20
"""What one thread copies at a time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a piece of the plan: its first byte in the bucket and in a send buffer, and the mapped bytes.

    With `dtypes`, they are cast from the first to the second.
    """

    offset: int
    send_buffer_offset: int
    nbytes: int
    held: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype] | None

    def copy(self, target: torch.Tensor) -> None:
        """To `target`, uint8[nbytes] in host memory."""
        if self.dtypes is None:
            target.copy_(self.held)
        else:
            source, wanted = self.dtypes
            target.view(wanted).copy_(_typed(self.held, source))


@dataclass(frozen=True, slots=True)
class _Mapped:
    """`parts` by bucket; `pieces` are the same uncut: each with its bytes and the dtype that they are of."""

    buffers: Mapping[str, SharedBuffer]
    parts: Mapping[int, Sequence[_Part]]
    pieces: Sequence[tuple[Piece, torch.Tensor, torch.dtype]]


class MappedSendBuffer:
    """One trainer rank's share of each checkpoint that is registered; one of them is what is published."""

    def __init__(self, plan: Plan, trainer: int) -> None:
        self._plan, self._pieces = plan, plan.trainer_pieces(trainer)
        self.nbytes = plan.send_buffer_nbytes(trainer)
        self._mapped: dict[str, _Mapped] = {}
        self._published = ""
        self._bounce: Bounce | None = None

    def source(self, name: str, exports: Mapping[str, HostExport | None], to_device: bool) -> None:
        """Map `exports` by checkpoint, let go of those that are None, and publish `name` from now on.

        With an empty `name`, whatever is there: the layout of all is the same. If `fill` is to copy
        `to_device`, page-locked memory is taken now, which no update then waits for. Raises PeerLostError
        when the process that read it is gone, StateError when `name` is not mapped.
        """
        for each in exports:
            self._let_go(each)
        with ThreadPoolExecutor(num_threads(8)) as threads:
            for each, export in exports.items():
                if export:
                    self._mapped[each] = mapped = self._map(export)
                    threads.map(map_pages, [part.held for part in chain(*mapped.parts.values())])
            if to_device and self._bounce is None:
                self._bounce = Bounce(self._plan.slots, self._longest())
        if name and name not in self._mapped:
            raise StateError(f"checkpoint {name} is not mapped here")
        if name or self._published not in self._mapped:
            self._published = name or next(iter(self._mapped), "")

    def fill(self, bucket: int, slot: torch.Tensor) -> None:
        """Copy this rank's pieces of `bucket` to where they lie in `slot`, uint8[n].

        To a device they are on their way when this returns. What had the slot before has to have arrived.
        """
        parts = self._parts().get(bucket, ())
        if parts and self._bounce:
            self._bounce.send(bucket, parts, slot)
            return
        for part in parts:
            part.copy(slot[part.offset : part.offset + part.nbytes])

    def save(self, to: torch.Tensor) -> None:
        """Copy all of it to `to`, uint8[nbytes] on the host, as a send buffer holds it."""
        for part in chain(*self._parts().values()):
            part.copy(to[part.send_buffer_offset : part.send_buffer_offset + part.nbytes])

    def held(self) -> Iterator[Part]:
        """What this rank sends of the checkpoint that is published. Raises StateError before there is one."""
        for piece, data, dtype in self._now().pieces:
            yield piece.tensor, piece.box, _typed(data, dtype).view(piece.box.extent)

    def close(self) -> None:
        if self._bounce:
            self._bounce.close()
            self._bounce = None
        for name in [*self._mapped]:
            self._let_go(name)

    def _longest(self) -> int:
        """The most bytes from the first to the last of this rank's in a bucket."""
        buckets = (list(its) for _, its in groupby(self._pieces, attrgetter("bucket")))
        spans = (
            max(piece.offset + piece.nbytes for piece in its) - min(piece.offset for piece in its)
            for its in buckets
        )
        return max(spans, default=0)

    def _parts(self) -> Mapping[int, Sequence[_Part]]:
        return self._now().parts

    def _now(self) -> _Mapped:
        if not self._published:
            raise StateError("no checkpoint is mapped here: register one")
        return self._mapped[self._published]

    def _let_go(self, name: str) -> None:
        if mapped := self._mapped.pop(name, None):
            for buffer in mapped.buffers.values():
                buffer.close()

    def _map(self, export: HostExport) -> _Mapped:
        buffers: dict[str, SharedBuffer] = {}
        for name, handle in export.buffers.items():
            buffers[name] = SharedBuffer.open(handle, touch=False)
        parts: defaultdict[int, list[_Part]] = defaultdict(list)
        pieces = []
        for piece, held, dtypes in _held(self._plan, self._pieces, export, buffers):
            parts[piece.bucket] += _cut(piece, held, dtypes)
            pieces.append((piece, held, dtypes[0]))
        return _Mapped(buffers, parts, pieces)


def _held(
    plan: Plan, pieces: Sequence[Piece], export: HostExport, buffers: Mapping[str, SharedBuffer]
) -> Iterator[tuple[Piece, torch.Tensor, tuple[torch.dtype, torch.dtype]]]:
    """Each piece with its bytes where they lie, and the dtypes that it has there and that it is sent in."""
    segments = [sorted(held, key=lambda each: each.box.offset) for held in by_tensor(plan, export.layout)]
    offsets = [[segment.box.offset for segment in held] for held in segments]
    dtypes = {meta.name: meta.dtype for meta in export.layout.tensors}
    for piece in pieces:
        segment = segments[piece.tensor][bisect_right(offsets[piece.tensor], piece.box.offset) - 1]
        assert segment.box.contains(piece.box)
        source, wanted = (
            getattr(torch, dtype) for dtype in (dtypes[segment.tensor], plan.tensors[piece.tensor].dtype)
        )
        start = segment.byte_offset + _first(segment, piece.box)
        nbytes = piece.box.numel * source.itemsize
        yield piece, buffers[segment.buffer].tensor[start : start + nbytes], (source, wanted)


def _cut(piece: Piece, held: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> Iterator[_Part]:
    source, wanted = dtypes
    step = PART_NBYTES // max(source.itemsize, wanted.itemsize)
    for first in range(0, piece.box.numel, step):
        numel, offset = min(step, piece.box.numel - first), first * wanted.itemsize
        yield _Part(
            piece.offset + offset,
            piece.send_buffer_offset + offset,
            numel * wanted.itemsize,
            held[first * source.itemsize : (first + numel) * source.itemsize],
            None if source == wanted else dtypes,
        )


def _first(segment: Segment, box: Box) -> int:
    """The byte of the segment at which `box`, a run of its rows, starts."""
    return sum(
        (at - origin) * stride
        for at, origin, stride in zip(box.offset, segment.box.offset, segment.strides, strict=True)
    )


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Files need not align what they hold."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


SendBuffer: TypeAlias = SharedBuffer | MappedSendBuffer


def send_buffer_for(
    plan: Plan, trainer: int, source: str, before: Plan | None, send_buffer: SendBuffer | None
) -> SendBuffer | None:
    """Return the send buffer of `trainer` (-1: none), `send_buffer` itself if its bytes are laid out alike.

    `source` is what the rank's layout says of its device. `before` is the plan that `send_buffer` was made
    for. Closes it if it is of no further use. Raises TransportError when the host has not that much memory.
    """
    if send_buffer is not None:
        if (
            trainer >= 0
            and isinstance(send_buffer, SharedBuffer)
            and source != MAPPED
            and before is not None
            and before.tensors == plan.tensors
            and before.trainer_pieces(trainer) == plan.trainer_pieces(trainer)
        ):
            return send_buffer
        send_buffer.close()
    if trainer >= 0 and source == MAPPED:
        return MappedSendBuffer(plan, trainer)
    return SharedBuffer.create(plan.send_buffer_nbytes(trainer)) if trainer >= 0 else None


def snapshot_content(send_buffer: SendBuffer | None) -> SnapshotContent | None:
    """What is kept of it."""
    return Copy(send_buffer) if isinstance(send_buffer, SharedBuffer) else send_buffer


def written(send_buffer: SendBuffer | None) -> BufferHandle | None:
    """Where a trainer rank publishes, if it does."""
    return send_buffer.handle if isinstance(send_buffer, SharedBuffer) else None
