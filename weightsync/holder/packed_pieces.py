"""The pieces that a trainer rank sends, copied from the rank's memory to bucket slots on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.memory.device import MappedTensors
from weightsync.memory.kernels.bucket_copies import bucket_rows
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.memory.tensors import segment_view
from weightsync.plan import Piece, Plan, RankLayout, Segment
from weightsync.plan.broadcast.plan import by_tensor


class PackedPieces:
    """The copies of one holder. One kernel copies most pieces of a bucket; torch casts the others."""

    def __init__(
        self,
        plan: Plan,
        holder: int,
        slots: Sequence[torch.Tensor],
        memory: MappedTensors,
        layout: RankLayout,
        num_blocks: int,
    ) -> None:
        """`slots`: each uint8, one dimension. `layout`: the trainer's, whose buffers are in `memory`."""
        segments = by_tensor(plan, layout)
        dtypes = {meta.name: meta.dtype for meta in layout.tensors}
        cast = {
            index
            for index, held in enumerate(segments)
            if held and dtypes[held[0].tensor] != plan.tensors[index].dtype
        }

        def is_own(piece: Piece) -> bool:
            return plan.members.trainers[piece.trainer] == holder

        self._copies = CopyTable(
            *bucket_rows(
                plan,
                segments,
                memory.addresses(),
                [slot.data_ptr() for slot in slots],
                into=False,
                only=lambda piece: is_own(piece) and piece.tensor not in cast,
            ),
            num_blocks,
        )
        self._casts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for piece in (piece for bucket in plan.buckets() for piece in bucket.pieces if cast):
            if is_own(piece) and piece.tensor in cast:
                held, meta = segments[piece.tensor], plan.tensors[piece.tensor]
                slot = slots[piece.bucket % len(slots)][piece.offset : piece.offset + piece.nbytes]
                target = slot.view(getattr(torch, meta.dtype)).view(piece.box.extent)
                pairs = _pairs(piece, target, held, memory, getattr(torch, dtypes[held[0].tensor]))
                self._casts.setdefault(piece.bucket, []).extend(pairs)

    def fill(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """Start the copies to a bucket's slot. `stream` is the current one."""
        self._copies.launch(bucket, stream)
        for target, source in self._casts.get(bucket, ()):
            target.copy_(source)


def _pairs(
    piece: Piece, target: torch.Tensor, segments: Sequence[Segment], memory: MappedTensors, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (target, source) views of a piece that torch has to cast. `target` is the whole piece."""
    pairs = []
    for segment in segments:
        part = piece.box.intersect(segment.box)
        if part is not None:
            held = segment_view(memory[segment.buffer].view(dtype), segment)
            pairs.append((target[part.slices(piece.box)], held[part.slices(segment.box)]))
    return pairs
