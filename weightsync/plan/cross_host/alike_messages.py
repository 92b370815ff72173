"""Makes messages of reads in kinds: most trainers send alike ones, which are planned once."""

from __future__ import annotations

from weightsync.plan.cross_host.shuffle import Messages, bundle_messages
from weightsync.plan.direct.alike import Kinds, Places, expanded
from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.layout import Int64

_ALIKE = ("src", "rows", "row_nbytes", "src_pitch", "dst_pitch", "src_buffer", "dst_buffer")
"""All columns of reads but the trainer, and where in their buffers they are written."""


class AlikeMessages:
    """The messages of bundles of one receiver, for reads in kinds.

    Trainers with equal parts of each tensor, as with FSDP, send the receiver the same messages, except for
    the places where the receiver writes them.
    """

    def __init__(self, kinds: Kinds, places: Places | None) -> None:
        """`kinds` and `places` are the arguments of `expanded`."""
        self._kinds, self._places = kinds, places
        self._known: dict[tuple[int | bytes, ...], tuple[Reads, Messages, Int64]] = {}

    def of(self, reads: Reads, low: int, high: int, capacity: int) -> Messages:
        """Return the messages of a bundle's reads from one trainer.

        Takes the arguments of `expanded` and `bundle_messages`.
        """
        key = (low, high, capacity, *(getattr(reads, name).tobytes() for name in _ALIKE))
        if key not in self._known:
            made = bundle_messages(expanded(reads, self._kinds, self._places, low, high), capacity)
            row, _ = self._kinds.rows(reads, low, high)
            self._known[key] = reads, made, row[made.origin]
            return made
        first, made, row = self._known[key]
        return made.moved(int(reads.trainer[0]), (reads.dst - first.dst)[row])
