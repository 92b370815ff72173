"""Segments that follow from a rank's place in a mesh: stated once for all ranks of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightsync.plan.layout.column import Column, Positions, column, narrowed, ranges
from weightsync.plan.layout.segment import ITEMSIZE, Cut, MeshPlace, Segment, TensorMeta


@dataclass(frozen=True, slots=True, eq=False)
class MeshSegments:
    """n segments of any rank of a mesh.

    A segment is contiguous and fills its buffer from the first byte.

    Attributes:
        tensor, buffer: [n], the numbers of the names.
        itemsize, ndim: [n], by tensor.
        shape: [sum of ndim], one tensor's after the other's.
        cut: [n], an index into `cuts`.
        cuts, sizes: as in `MeshPlace`.
    """

    tensor: Column
    buffer: Column
    itemsize: Column
    ndim: Column
    shape: Column
    cut: Column
    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        segments: Sequence[Segment],
        tensors: Sequence[TensorMeta],
        place: MeshPlace,
        tensor: Column,
        buffer: Column,
    ) -> MeshSegments | None:
        """State the segments of a rank at `place`. None if a segment has an unknown tensor or buffer.

        The segments that follow from the result may differ from `segments`: compare them.
        """
        metas = {meta.name: meta for meta in tensors}
        if not all(each.tensor in metas and each.buffer in place.cuts for each in segments):
            return None
        held = [metas[each.tensor] for each in segments]
        cuts = [place.cuts[each.buffer] for each in segments]
        if any(dim >= len(meta.shape) for meta, cut in zip(held, cuts, strict=True) for _, dim in cut):
            return None
        numbers = {cut: number for number, cut in enumerate(dict.fromkeys(cuts))}
        return cls(
            tensor=tensor,
            buffer=buffer,
            itemsize=column(ITEMSIZE[meta.dtype] for meta in held),
            ndim=column(len(meta.shape) for meta in held),
            shape=column(dim for meta in held for dim in meta.shape),
            cut=column(numbers[cut] for cut in cuts),
            cuts=tuple(numbers),
            sizes=place.sizes,
        )

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Positions) -> MeshSegments:
        """Return the segments at `rows`, int[m]."""
        ndim = self.ndim.astype(np.int64)
        dims = ranges((np.cumsum(ndim) - ndim)[rows], ndim[rows])
        parts = {name: getattr(self, name)[rows] for name in ("tensor", "buffer", "itemsize", "ndim", "cut")}
        return replace(self, **parts, shape=self.shape[dims])

    def at(self, coordinates: Sequence[int]) -> Mapping[str, Column]:
        """Return the columns of `SegmentTable` of the rank at `coordinates`."""
        ndim = self.ndim.astype(np.int64)
        first = np.cumsum(ndim) - ndim
        extent = self.shape.astype(np.int64)
        offset = np.zeros_like(extent)
        for number, cut in enumerate(self.cuts):
            rows = first[self.cut == number]
            for axis, dim in cut:
                at, size = rows + dim, extent[rows + dim]
                most = -(-size // self.sizes[axis])
                start = np.minimum(most * coordinates[axis], size)
                extent[at] = np.minimum(most, size - start)
                # Of a rank without rows, torch says that they start at the tensor's end.
                offset[at] = np.where(extent[at] > 0, offset[at] + start, self.shape[at])
        return {
            "tensor": self.tensor,
            "buffer": self.buffer,
            "byte_offset": np.zeros(len(self), np.int8),
            "ndim": self.ndim,
            "offset": narrowed(offset),
            "extent": narrowed(extent),
            "strides": narrowed(_strides(extent, ndim, first, self.itemsize.astype(np.int64))),
        }


def _strides(extent: Column, ndim: Column, first: Column, itemsize: Column) -> Column:
    """Return the strides of contiguous boxes, as torch has them: it counts no rows as one."""
    strides, step = np.zeros_like(extent), itemsize.copy()
    for back in range(1, int(ndim.max(initial=0)) + 1):
        rows = np.flatnonzero(ndim >= back)
        at = (first + ndim)[rows] - back
        strides[at] = step[rows]
        step[rows] *= np.maximum(extent[at], 1)
    return strides
