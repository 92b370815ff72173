"""Makes messages of reads in kinds. Equal messages of many trainers are planned once."""

from __future__ import annotations

from weightsync.plan.cross_host.shuffle import Messages, bundle_messages
from weightsync.plan.direct.alike import Kinds, Places, expanded
from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.layout import Int64

_ALIKE = ("src", "rows", "row_nbytes", "src_pitch", "dst_pitch", "src_buffer", "dst_buffer")
"""All columns of reads except the trainer, and the places in target buffers."""


class AlikeMessages:
    """The messages of one receiver's bundles, for reads in kinds.

    Trainers with equal parts of all tensors, as with FSDP, send the receiver the same messages. Only the
    places where the receiver writes them differ.
    """

    def __init__(self, kinds: Kinds, places: Places | None) -> None:
        """`kinds` and `places` are the arguments of `expanded`."""
        self._kinds, self._places = kinds, places
        self._known: dict[tuple[int | bytes, ...], tuple[Reads, Messages, Int64]] = {}

    def of(self, reads: Reads, low: int, high: int, capacity: int) -> Messages:
        """Return the messages of a bundle's reads from one trainer.

        The arguments are those of `expanded` and `bundle_messages`.
        """
        key = (low, high, capacity, *(getattr(reads, name).tobytes() for name in _ALIKE))
        if key not in self._known:
            made = bundle_messages(expanded(reads, self._kinds, self._places, low, high), capacity)
            row, _ = self._kinds.rows(reads, low, high)
            self._known[key] = reads, made, row[made.origin]
            return made
        first, made, row = self._known[key]
        return made.moved(int(reads.trainer[0]), (reads.dst - first.dst)[row])
