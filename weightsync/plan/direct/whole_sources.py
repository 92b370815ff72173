"""Finds tensors that can be read in place, since one trainer's buffer has all their bytes together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.copies import stable_order
from weightsync.plan.layout.layout import Bool, Int64


@dataclass(frozen=True, slots=True)
class WholeSource:
    """Where all bytes of a target lie, in their order: in a trainer's buffer, from `offset` on."""

    trainer: int
    buffer: str
    offset: int

    @property
    def key(self) -> tuple[int, str]:
        """The trainer's rank and the buffer's name."""
        return self.trainer, self.buffer


def whole_sources(reads: Reads) -> dict[str, WholeSource]:
    """Return the sources of targets that one dense copy would fill, by the target's name.

    Args:
        reads: all reads of each target. They fill the target from the first byte on, without gaps.
    """
    if not len(reads):
        return {}
    its = reads.take(stable_order(reads.dst_buffer.astype(np.int64)))
    first = np.flatnonzero(np.diff(its.dst_buffer, prepend=-1))
    pitch_is_dense = (its.src_pitch == its.row_nbytes) & (its.dst_pitch == its.row_nbytes)
    lane = its.trainer.astype(np.int64) * len(its.src_names) + its.src_buffer
    start = its.src - its.dst
    is_whole = (
        np.logical_and.reduceat((its.rows == 1) | pitch_is_dense, first)
        & _is_one(lane, first)
        & _is_one(start, first)
    )
    return {
        its.dst_names[its.dst_buffer[at]]: WholeSource(
            int(its.trainer[at]), its.src_names[its.src_buffer[at]], int(start[at])
        )
        for at in first[is_whole].tolist()
    }


def _is_one(column: Int64, first: Int64) -> Bool:
    """Return the groups with a single value. A group is the rows from each of `first` on."""
    found: Bool = np.minimum.reduceat(column, first) == np.maximum.reduceat(column, first)
    return found
