"""Where the pieces of a plan lie on a device, to be read as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from weightsync.memory.tensors import segment_view, typed
from weightsync.plan import Box, Piece, Plan, RankLayout, Segment, TensorMeta
from weightsync.plan.plan import by_tensor


class PieceMemory(Protocol):
    """Memory that holds all pieces of a plan, each at least while its bucket is worked on."""

    @property
    def device(self) -> torch.device:
        """The device of the memory."""

    def view(self, piece: Piece) -> torch.Tensor:
        """View a piece: shape ``piece.box.extent``, in the dtype of its tensor."""

    def whole(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """View the tensor that `pieces`, all that a bucket has of one, make up if they lie row after row.

        None if they are not all of it, or lie otherwise.
        """


class SlotPieces:
    """Pieces in the bucket slots: uint8, one dimension, one device."""

    def __init__(self, plan: Plan, slots: Sequence[torch.Tensor]) -> None:
        self._plan, self._slots = plan, slots
        self.device = slots[0].device

    def view(self, piece: Piece) -> torch.Tensor:
        """View a piece, as `PieceMemory`."""
        return self._view(piece, self._plan.tensors[piece.tensor], piece.box)

    def whole(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """View a whole tensor, as `PieceMemory`."""
        meta, first = self._plan.tensors[pieces[0].tensor], min(pieces, key=lambda piece: piece.offset)
        return self._view(first, meta, Box.whole(meta.shape)) if _is_run(meta, pieces) else None

    def _view(self, first: Piece, meta: TensorMeta, box: Box) -> torch.Tensor:
        slot = self._slots[first.bucket % len(self._slots)]
        nbytes = box.numel * meta.itemsize
        return typed(slot[first.offset : first.offset + nbytes], meta, box)


class SourcePieces:
    """Pieces in the memory of the one trainer rank that has them all, where they are final."""

    def __init__(
        self, plan: Plan, segments: Mapping[int, Segment], memory: Mapping[str, torch.Tensor]
    ) -> None:
        """
        Args:
            segments: the place of each tensor, by its number.
            memory: the rank's buffers: uint8, one dimension, one device.
        """
        self._plan, self._segments, self._memory = plan, segments, memory
        self.device = next(iter(memory.values())).device

    @classmethod
    def find(cls, plan: Plan, layout: RankLayout, memory: Mapping[str, torch.Tensor]) -> SourcePieces | None:
        """Return the pieces of a plan in a rank's memory; None if it has not all, in the plan's dtypes."""
        held = by_tensor(plan, layout)
        dtypes = {meta.name: meta.dtype for meta in layout.tensors}
        its = {number: found[0] for number, found in enumerate(held) if len(found) == 1}
        pieces = (piece for bucket in plan.buckets() for piece in bucket.pieces)
        if not memory or not all(
            piece.tensor in its
            and its[piece.tensor].box.contains(piece.box)
            and dtypes[its[piece.tensor].tensor] == plan.tensors[piece.tensor].dtype
            for piece in pieces
        ):
            return None
        return cls(plan, its, memory)

    def view(self, piece: Piece) -> torch.Tensor:
        """View a piece, as `PieceMemory`."""
        segment = self._segments[piece.tensor]
        dtype: torch.dtype = getattr(torch, self._plan.tensors[piece.tensor].dtype)
        held = segment_view(self._memory[segment.buffer].view(dtype), segment)
        return held[piece.box.slices(segment.box)]

    def whole(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """View a whole tensor, as `PieceMemory`."""
        view = self.view(pieces[0])
        shape = self._plan.tensors[pieces[0].tensor].shape
        return view if len(pieces) == 1 and tuple(view.shape) == shape and view.is_contiguous() else None


def _is_run(meta: TensorMeta, pieces: Sequence[Piece]) -> bool:
    """Whether pieces of a tensor in one bucket are all of it, where each row follows the one before."""
    whole = Box.whole(meta.shape)
    strides, start = whole.strides(meta.itemsize), min(piece.offset for piece in pieces)
    return sum(piece.nbytes for piece in pieces) == meta.nbytes and all(
        piece.box.extent[1:] == meta.shape[1:] and piece.offset - start == whole.distance(piece.box, strides)
        for piece in pieces
    )
