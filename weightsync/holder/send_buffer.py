"""The sources that a holder sends from: a host buffer, or mapped checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from typing import TypeAlias

import torch

from weightsync.errors import StateError
from weightsync.holder.trainer_parts import Part, copied_parts, parts_in_place
from weightsync.memory.host import SharedBuffer, map_pages, num_threads
from weightsync.plan import MAPPED, Piece, Plan, RankLayout
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.protocol.handles import BufferHandle, HostExport


class Bounce:
    """One page-locked buffer per slot. Threads fill one while another is copied to the device.

    The source then needs no page-locking, which takes longer than sending it once.
    """

    def __init__(self, num_slots: int, nbytes: int) -> None:
        """`nbytes`: the longest span of this rank's bytes in a bucket."""
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_slots)]
        self._threads = ThreadPoolExecutor(num_threads(8), "bounce")

    def send(self, bucket: int, parts: Sequence[_Part], slot: torch.Tensor) -> None:
        """Start copying `parts` to `slot` on the current stream. The slot's previous copy must have ended."""
        buffer, first = self._buffers[bucket % len(self._buffers)], min(part.offset for part in parts)
        places = [buffer[part.offset - first :][: part.nbytes] for part in parts]
        copied = self._threads.map(lambda part, place: part.copy(place), parts, places)
        for part, place, _ in zip(parts, places, copied, strict=True):
            slot[part.offset : part.offset + part.nbytes].copy_(place, non_blocking=True)

    def close(self) -> None:
        """Free the memory. No copy may be running."""
        self._threads.shutdown()
        self._buffers = []


PART_NBYTES = 4 << 20
"""The most bytes that one thread copies at a time."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a piece: the offsets in the bucket and a send buffer, and `held`, the mapped bytes.

    With `dtypes`, `held` is cast from the first to the second.
    """

    offset: int
    send_buffer_offset: int
    nbytes: int
    held: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype] | None

    def copy(self, target: torch.Tensor) -> None:
        """Copy to `target`, uint8[nbytes] in host memory, with the cast if there is one. Thread-safe."""
        if self.dtypes is None:
            target.copy_(self.held)
        else:
            source, wanted = self.dtypes
            target.view(wanted).copy_(_typed(self.held, source))


@dataclass(frozen=True, slots=True)
class _Mapped:
    """One mapped checkpoint: `parts` by bucket, and `pieces` uncut, with their bytes and dtypes."""

    buffers: Mapping[str, SharedBuffer]
    parts: Mapping[int, Sequence[_Part]]
    pieces: Sequence[tuple[Piece, torch.Tensor, torch.dtype]]


class MappedSendBuffer:
    """One trainer rank's share of every registered checkpoint. One of them is published."""

    def __init__(self, plan: Plan, trainer: int) -> None:
        self._plan, self._pieces = plan, plan.trainer_pieces(trainer)
        self.nbytes = plan.send_buffer_nbytes(trainer)
        self._mapped: dict[str, _Mapped] = {}
        self._published = ""
        self._bounce: Bounce | None = None

    def source(self, name: str, exports: Mapping[str, HostExport | None], to_device: bool) -> None:
        """Map the checkpoints in `exports`, unmap those that are None, and publish `name`.

        An empty `name` keeps the published checkpoint, or takes any: all have the same layout. With
        `to_device`, page-locked memory for `fill` is allocated now, so that no update waits for it. Raises
        PeerLostError when the process that read a checkpoint is gone, StateError when `name` is not mapped.
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
        """Copy this rank's pieces of `bucket` to their offsets in `slot`, uint8[n].

        Copies to a device may still run when this returns. The slot's previous copy must have ended.
        """
        parts = self._parts().get(bucket, ())
        if parts and self._bounce:
            self._bounce.send(bucket, parts, slot)
            return
        for part in parts:
            part.copy(slot[part.offset : part.offset + part.nbytes])

    def save(self, to: torch.Tensor) -> None:
        """Copy the published share to `to`, uint8[nbytes] on the host. The layout is a send buffer's."""
        for part in chain(*self._parts().values()):
            part.copy(to[part.send_buffer_offset : part.send_buffer_offset + part.nbytes])

    def held(self) -> Iterator[Part]:
        """Yield this rank's parts of the published checkpoint. Raises StateError if there is none."""
        for piece, data, dtype in self._now().pieces:
            yield piece.tensor, piece.box, _typed(data, dtype).view(piece.box.extent)

    def close(self) -> None:
        if self._bounce:
            self._bounce.close()
            self._bounce = None
        for name in [*self._mapped]:
            self._let_go(name)

    def _longest(self) -> int:
        """Return the longest span of this rank's bytes in any bucket."""
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
    """Yield each piece with the mapped bytes, and the dtypes before and after the cast."""
    layout = export.layout.rank_layout()
    segments = [sorted(held, key=lambda each: each.box.offset) for held in by_tensor(plan, layout)]
    offsets = [[segment.box.offset for segment in held] for held in segments]
    dtypes = {meta.name: meta.dtype for meta in layout.tensors}
    for piece in pieces:
        segment = segments[piece.tensor][bisect_right(offsets[piece.tensor], piece.box.offset) - 1]
        assert segment.box.contains(piece.box)
        source, wanted = (
            getattr(torch, dtype) for dtype in (dtypes[segment.tensor], plan.tensors[piece.tensor].dtype)
        )
        start = segment.start(piece.box)
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


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View `data` as `dtype`. Unaligned bytes are copied: files need not align tensors."""
    return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)


SendBuffer: TypeAlias = SharedBuffer | MappedSendBuffer


def send_buffer_for(
    plan: Plan, trainer: int, source: str, before: Plan | None, was: int, send_buffer: SendBuffer | None
) -> SendBuffer | None:
    """Return the send buffer of `trainer` (-1: none). Reuses `send_buffer` if the layout is unchanged.

    `source` is the device in the rank's layout. `before` is the plan that `send_buffer` was made for, and
    `was` the trainer's rank in it. Closes `send_buffer` if it is not reused. Raises TransportError when the
    host is short of memory.
    """
    if send_buffer is not None:
        if (
            trainer >= 0
            and isinstance(send_buffer, SharedBuffer)
            and source != MAPPED
            and before is not None
            and before.tensors == plan.tensors
            and before.trainer_pieces(was) == plan.trainer_pieces(trainer)
        ):
            return send_buffer
        send_buffer.close()
    if trainer < 0:
        return None
    if source == MAPPED:
        return MappedSendBuffer(plan, trainer)
    return SharedBuffer.create(plan.send_buffer_nbytes(trainer))


def published_parts(
    plan: Plan,
    trainer: int,
    send_buffer: SendBuffer | None,
    read: tuple[RankLayout, Mapping[str, torch.Tensor]] | None,
) -> Iterator[Part]:
    """Yield the parts that `trainer` published, or has in memory that is `read` in place."""
    if read:
        return parts_in_place(plan, trainer, *read)
    assert send_buffer is not None
    if isinstance(send_buffer, SharedBuffer):
        return copied_parts(plan, trainer, send_buffer.tensor)
    return send_buffer.held()


def buffer_handle(send_buffer: SendBuffer | None) -> BufferHandle | None:
    """Return the handle of the memory that a trainer rank publishes into, if any."""
    return send_buffer.handle if isinstance(send_buffer, SharedBuffer) else None
