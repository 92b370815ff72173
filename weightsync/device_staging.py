"""Bucket slots on a device, and the kernels that fill a holder's share of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from weightsync.buffers import Export, Handle
from weightsync.device_memory import DeviceBuffer
from weightsync.errors import DeadlineError
from weightsync.kernels import CopyTable
from weightsync.memory import SharedBuffer
from weightsync.plan import Piece, Plan, Segment, Step
from weightsync.plan.copies import Copies, Copy
from weightsync.rows import by_tensor, meeting_rows
from weightsync.staging import Filled

__all__ = ["DeviceStaging", "take_slots"]


def take_slots(
    plan: Plan, before: Sequence[DeviceBuffer]
) -> tuple[Sequence[DeviceBuffer], Sequence[DeviceBuffer]]:
    """The slots that `plan` needs, and those of `before` that are of no further use.

    An earlier epoch's are kept if they are large enough: who mapped them need not do so again.
    Raises TransportError when the device has not that much memory.
    """
    if len(before) == plan.slots and all(slot.handle.nbytes >= plan.max_bucket_nbytes for slot in before):
        return before, ()
    return [DeviceBuffer.create(plan.max_bucket_nbytes) for _ in range(plan.slots)], before


class DeviceStaging:
    """Slots on this process's device, filled from the pinned arena or out of the trainer's own memory."""

    device = "cuda"

    def __init__(
        self, plan: Plan, index: int, arena: SharedBuffer | None, slots: Sequence[DeviceBuffer]
    ) -> None:
        self._plan, self._index, self._arena = plan, index, arena
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffers = slots
        self._mapped: dict[str, DeviceBuffer] = {}
        self._pack: CopyTable | None = None
        self._casts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def slots(self) -> tuple[Handle, ...]:
        return tuple(buffer.handle for buffer in self._buffers)

    def read_from(self, export: Export) -> None:
        """Map the trainer's memory, and work out every copy out of it once."""
        self._mapped = {name: DeviceBuffer.open(handle) for name, handle in export.buffers.items()}
        segments = by_tensor(self._plan, export.layout)
        dtypes = {meta.name: meta.dtype for meta in export.layout.tensors}
        address = {name: buffer.tensor.data_ptr() for name, buffer in self._mapped.items()}
        rows: list[Copy] = []
        bounds = [0]
        for bucket in range(self._plan.num_buckets):
            base = self._slot(bucket).data_ptr()
            for piece in self._own(bucket):
                meta, held = self._plan.tensors[piece.tensor], segments[piece.tensor]
                if dtypes[held[0].tensor] == meta.dtype:
                    start = base + piece.offset
                    rows += meeting_rows(piece.box, start, held, address, meta.itemsize, into=False)
                else:
                    pairs = self._cast(piece, held, dtypes[held[0].tensor])
                    self._casts.setdefault(bucket, []).extend(pairs)
            bounds.append(len(rows))
        self._pack = CopyTable(Copies.of(rows), bounds)

    @contextmanager
    def queue(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def fill(self, bucket: int, timeout_s: float) -> Filled:
        stream = self._stream
        if self._pack:
            self._pack.launch(bucket, stream)
            for target, source in self._casts.get(bucket, ()):
                target.copy_(source)
        elif self._arena is not None:
            for step in self._plan.bucket_steps(bucket):
                if step.root == self._index:
                    held = self._arena.tensor[step.arena_offset : step.arena_offset + step.nbytes]
                    self.at(step).copy_(held, non_blocking=True)
        return _Event(stream, timeout_s)

    def at(self, step: Step) -> torch.Tensor:
        return self._slot(step.bucket)[step.offset : step.offset + step.nbytes]

    def close(self) -> None:
        """Let go of the trainer's memory. The slots are the holder's, and outlive an epoch."""
        for buffer in self._mapped.values():
            buffer.close()
        self._mapped, self._pack, self._casts = {}, None, {}

    def _slot(self, bucket: int) -> torch.Tensor:
        return self._buffers[bucket % len(self._buffers)].tensor

    def _own(self, bucket: int) -> list[Piece]:
        trainers = self._plan.members.trainers
        return [p for p in self._plan.bucket(bucket).pieces if trainers[p.trainer] == self._index]

    def _cast(
        self, piece: Piece, segments: list[Segment], dtype: str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies with a change of dtype, which bytes alone cannot do: (target, source) views."""
        meta = self._plan.tensors[piece.tensor]
        slot = self._slot(piece.bucket)[piece.offset : piece.offset + piece.nbytes]
        target = slot.view(getattr(torch, meta.dtype)).view(piece.box.extent)
        pairs = []
        for segment in segments:
            part = piece.box.intersect(segment.box)
            if part is not None:
                source = self._mapped[segment.buffer].tensor.view(getattr(torch, dtype))
                strides = tuple(stride // source.element_size() for stride in segment.strides)
                offset = segment.byte_offset // source.element_size()
                held = torch.as_strided(source, segment.box.extent, strides, offset)
                pairs.append((target[part.slices(piece.box)], held[part.slices(segment.box)]))
        return pairs


class _Event:
    """The end of what a stream was given so far."""

    def __init__(self, stream: torch.cuda.Stream, timeout_s: float) -> None:
        self._event, self._timeout_s = stream.record_event(), timeout_s

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                raise DeadlineError("fill", ("the device",), self._timeout_s)
            time.sleep(0)
