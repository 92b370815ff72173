"""The trainers' layout. It lists the segments of those tensors that a caller asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from weightsync.plan.layout.declared import Declared
from weightsync.plan.layout.layout import Bool, Layout, join_tables, list_segments
from weightsync.plan.layout.layout_table import LayoutTable, SegmentTable
from weightsync.plan.layout.mesh_segments import MeshSegments
from weightsync.plan.layout.numbered import Numbered


class StatedLayout(Protocol):
    """A layout of the trainers that lists the segments of those tensors that a caller asks for."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    @property
    def stated(self) -> Layout:
        """All tensors, with some segments. All ranks cut tensors alike that have equal ones here."""

    def of_tensors(self, kept: Bool) -> Layout:
        """Return the segments of some tensors on all ranks. `kept`: bool[T]. Buffers keep their numbers."""


class TrainersLayout:
    """The layouts of all trainer ranks, joined as far as needed.

    A thousand FSDP ranks with parts of tens of thousands of tensors have as many segments as the product. The
    ranks state these segments in few rows, which also say which tensors are cut alike.

    Attributes:
        num_ranks: number of ranks.
        stated: all tensors, with the segments as ranks state them. Segments that several ranks state alike
            are included once. For all ranks of a mesh, the whole tensor is included, with its cut in place of
            the first stride. Two tensors with equal rows here are cut alike on all ranks.
    """

    def __init__(self, ranks: Sequence[LayoutTable]) -> None:
        """`ranks` has one layout for each rank, in order. Raises as `Layout.from_ranks`."""
        self._ranks, self.num_ranks = ranks, len(ranks)
        self._declared = declared = Declared.of(ranks)
        self._numbered = numbered = Numbered.of(declared, ranks)
        self.stated: Layout = list_segments(
            declared,
            numbered,
            [each.numbers for each in numbered.distinct],
            [_stated(each.segments) for each in numbered.distinct],
        )

    @cached_property
    def whole(self) -> Layout:
        """All segments of all ranks."""
        return join_tables(self._ranks, self._declared, self._numbered)

    def of_tensors(self, kept: Bool) -> Layout:
        """Return the segments of some tensors on all ranks. `kept`: bool[T]. Buffers keep their numbers."""
        return join_tables(self._ranks, self._declared, self._numbered, kept).of_tensors(kept)


def _stated(segments: SegmentTable | MeshSegments) -> SegmentTable:
    if isinstance(segments, SegmentTable):
        return segments
    nothing = np.zeros_like(segments.shape)
    strides = nothing.astype(segments.cut.dtype)
    ndim = segments.ndim.astype(np.int64)
    strides[(np.cumsum(ndim) - ndim)[ndim > 0]] = segments.cut[ndim > 0]
    return SegmentTable(
        segments.tensor,
        segments.buffer,
        np.zeros(len(segments), np.int8),
        segments.ndim,
        nothing,
        segments.shape,
        strides,
    )
