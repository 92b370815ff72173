"""Changes a traced layout to the experts that an engine's slots hold now.

A loader writes each expert to the slot in which an engine starts with it. An engine that balances the load of
experts moves them to other slots later, and has several copies of some.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weightsync.engines.loading.loader_trace import UnprovableError, joined
from weightsync.plan import Box, RankLayout, Segment
from weightsync.plan.layout.arrangement import Arrangement


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """An expert that a slot holds, as copy number `copy` of `num_copies` in all ranks."""

    expert: int
    copy: int
    num_copies: int


@dataclass(frozen=True, slots=True)
class _Piece:
    segment: Segment
    number: int
    slot: ExpertSlot

    @property
    def run(self) -> object:
        """Pieces with equal values may be joined to one segment."""
        return self.number if self.slot.num_copies > 1 else None


def arranged(
    layout: RankLayout, key: str, slots: Mapping[str, Sequence[ExpertSlot]], num_experts: int
) -> RankLayout:
    """Return `layout` with the experts that are in the slots now.

    Args:
        key: see `Arrangement`.
        slots: the slots of each buffer that holds experts, in memory order. Slots of a buffer have equal
            sizes.
        num_experts: the model's experts per layer.

    Raises:
        UnprovableError: the loader writes something else than parts of a stack of experts into a slot.
    """
    nbytes = {
        meta.name: meta.nbytes // len(slots[meta.name]) for meta in layout.buffers if meta.name in slots
    }
    stacks = {meta.name for meta in layout.tensors if meta.shape[:1] == (num_experts,)}
    segments, copies = [each for each in layout.segments if each.buffer not in slots], list[tuple[int, int]]()
    copies += [(0, 1)] * len(segments)
    for buffer, each in slots.items():
        held = [segment for segment in layout.segments if segment.buffer == buffer]
        if other := next((segment for segment in held if segment.tensor not in stacks), None):
            raise UnprovableError(f"{buffer}: {other.tensor} is no stack of {num_experts} experts")
        pieces = [piece for segment in held for piece in _pieces(segment, each, nbytes[buffer])]
        pieces.sort(key=lambda piece: (piece.number, piece.segment.byte_offset))
        for _, run in itertools.groupby(pieces, key=lambda piece: piece.run):
            its = [*run]
            made = joined(piece.segment for piece in its)
            segments += made
            copies += [(its[0].slot.copy, its[0].slot.num_copies)] * len(made)
    has_copies = any(count > 1 for _, count in copies)
    return replace(
        layout, segments=tuple(segments), arrangement=Arrangement(key, tuple(copies) if has_copies else ())
    )


def _pieces(segment: Segment, slots: Sequence[ExpertSlot], nbytes: int) -> Iterator[_Piece]:
    """Yield a segment's part in each slot, for the expert that is there now. A slot has `nbytes`."""
    (_, *offset), (count, *extent), (step, *steps) = segment.box.offset, segment.box.extent, segment.strides
    if count > 1 and step != nbytes:
        raise UnprovableError(f"{segment.buffer}: {segment.tensor} is not stored expert after expert")
    for number in range(count):
        start = segment.byte_offset + number * nbytes
        slot = slots[start // nbytes]
        box = Box((slot.expert, *offset), (1, *extent))
        part = Segment(segment.tensor, box, segment.buffer, start, (nbytes, *steps))
        yield _Piece(part, start // nbytes, slot)
