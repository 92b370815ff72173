"""Views of a plan's pieces in bucket slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.memory.tensors import typed
from weightsync.plan import Box, Piece, Plan, TensorMeta


class SlotPieces:
    """A plan's pieces in slots, while buckets are processed."""

    def __init__(self, plan: Plan, slots: Sequence[torch.Tensor]) -> None:
        """`slots`: uint8, one dimension, one device."""
        self._plan, self._slots = plan, slots
        self.device = slots[0].device

    def view(self, piece: Piece) -> torch.Tensor:
        """View a piece: shape ``piece.box.extent``, in the tensor's dtype, contiguous."""
        return self._view(piece, self._plan.tensors[piece.tensor], piece.box)

    def whole(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """View the whole tensor of `pieces`, all pieces of a tensor in a bucket.

        Returns None if the pieces are not the whole tensor, or are not stored row after row.
        """
        meta, first = self._plan.tensors[pieces[0].tensor], min(pieces, key=lambda piece: piece.offset)
        return self._view(first, meta, Box.whole(meta.shape)) if _is_run(meta, pieces) else None

    def _view(self, first: Piece, meta: TensorMeta, box: Box) -> torch.Tensor:
        slot = self._slots[first.bucket % len(self._slots)]
        nbytes = box.numel * meta.itemsize
        return typed(slot[first.offset : first.offset + nbytes], meta, box)


def _is_run(meta: TensorMeta, pieces: Sequence[Piece]) -> bool:
    """Return True if pieces of a tensor in one bucket are the whole tensor, row after row."""
    whole = Box.whole(meta.shape)
    strides, start = whole.strides(meta.itemsize), min(piece.offset for piece in pieces)
    return sum(piece.nbytes for piece in pieces) == meta.nbytes and all(
        piece.box.extent[1:] == meta.shape[1:] and piece.offset - start == whole.distance(piece.box, strides)
        for piece in pieces
    )
