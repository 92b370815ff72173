"""Segments of one side, by tensor, and which tensors have equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plan.layout.column import row_codes
from weightsync.plan.layout.layout import Bool, Int64, Layout


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """n segments of one side with elements, by tensor of the source, then by rank.

    Attributes:
        tensor, rank, buffer, byte_offset: [n].
        shape: columns [n] of all else that says where a segment is.
        start, count: [T], each tensor's first segment, and the number of segments.
    """

    tensor: Int64
    rank: Int64
    buffer: Int64
    byte_offset: Int64
    shape: tuple[Int64, ...]
    start: Int64
    count: Int64

    @classmethod
    def of(cls, layout: Layout, taken: Int64, num_tensors: int) -> TensorRows:
        """Return the segments of taken tensors. `taken` has the source's number of each tensor, or -1."""
        rows = np.flatnonzero((layout.extent > 0).all(axis=1) & (taken[layout.tensor] >= 0))
        rows = rows[np.argsort(taken[layout.tensor[rows]], kind="stable")]
        tensor = taken[layout.tensor[rows]]
        count = np.bincount(tensor, minlength=num_tensors)
        shape = (*layout.offset[rows].T, *layout.extent[rows].T, *layout.strides[rows].T)
        return cls(
            tensor,
            layout.rank[rows].astype(np.int64),
            layout.buffer[rows].astype(np.int64),
            layout.byte_offset[rows],
            shape,
            np.cumsum(count) - count,
            count,
        )

    def codes(self, columns: Sequence[Int64]) -> Int64:
        """Return a hash of each tensor's rows."""
        code = row_codes([self.nth(), self.rank, *self.shape, *columns]).astype(np.int64)
        sums = np.zeros(len(self.count), np.int64)
        np.add.at(sums, self.tensor, code)
        return sums

    def nth(self) -> Int64:
        """Return the index of each row within its tensor."""
        nth: Int64 = np.arange(len(self.tensor)) - self.start[self.tensor]
        return nth

    def differ(self, first: Int64, columns: Sequence[Int64]) -> Bool:
        """Return which tensors have other rows than the tensors `first`, of as many rows."""
        other = self.start[first[self.tensor]] + self.nth()
        found = np.zeros(len(self.count), np.bool_)
        for column in (self.rank, *self.shape, *columns):
            found[self.tensor[column != column[other]]] = True
        return found


def first_alike(layout: Layout) -> Int64:
    """Return for each tensor the first tensor of equal shape with equal segments: int64[T]."""
    num_tensors = len(layout.tensors)
    rows = TensorRows.of(layout, np.arange(num_tensors), num_tensors)
    codes = [rows.codes([rows.byte_offset]), rows.count, *layout.shape.T]
    first = firsts(row_codes(codes).astype(np.int64))
    same = (rows.count == rows.count[first]) & (layout.shape == layout.shape[first]).all(axis=1)
    own = np.arange(num_tensors)
    first = np.where(same, first, own)
    found: Int64 = np.where(rows.differ(first, [rows.byte_offset]), own, first)
    return found


def firsts(code: Int64) -> Int64:
    """Return for each entry the position of the first equal entry."""
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    found: Int64 = first[kind]
    return found
