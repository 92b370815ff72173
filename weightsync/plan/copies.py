"""2-D copies between byte addresses: what a copy of N-dimensional boxes comes down to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from weightsync.plan.buffers import Int64

__all__ = ["Copies", "Copy", "box_copies", "flattened", "repeated", "tiles"]

Copy = tuple[int, int, int, int, int, int]
"""src, dst, rows, row_nbytes, src_pitch, dst_pitch: see `Copies`."""

_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """n copies of `rows` rows of `row_nbytes` each; columns int64[n].

    Attributes:
        src, dst: byte address of the first row.
        src_pitch, dst_pitch: bytes from one row to the next.
    """

    src: Int64
    dst: Int64
    rows: Int64
    row_nbytes: Int64
    src_pitch: Int64
    dst_pitch: Int64

    @classmethod
    def of(cls, copies: Sequence[Copy]) -> Copies:
        """The columns of `copies`, in their order."""
        return cls(*np.array(copies, dtype=np.int64).reshape(-1, 6).T)

    def __len__(self) -> int:
        return len(self.src)

    def table(self) -> Int64:
        """int64[n, 6], the columns side by side."""
        return np.stack([getattr(self, field.name) for field in fields(self)], axis=1)


def box_copies(
    extent: Sequence[int],
    itemsize: int,
    src: int,
    src_strides: Sequence[int],
    dst: int,
    dst_strides: Sequence[int],
) -> list[Copy]:
    """One N-dimensional box as few 2-D copies: what is contiguous on both sides becomes one row.

    Args:
        extent: elements per dimension; a 0-d box is one element, an empty one needs no copies.
        itemsize: bytes per element.
        src, dst: byte addresses of the box's first element on both sides.
        src_strides, dst_strides: bytes per dimension.
    """
    if 0 in extent:
        return []
    row_nbytes, outer = _collapsed(extent, itemsize, src_strides, dst_strides)
    if not outer:
        return [(src, dst, 1, row_nbytes, row_nbytes, row_nbytes)]
    longest = max(range(len(outer)), key=lambda axis: outer[axis][0])
    rows, src_pitch, dst_pitch = outer.pop(longest)
    return [
        (
            src + sum(i * s for i, (_, s, _) in zip(index, outer, strict=True)),
            dst + sum(i * d for i, (_, _, d) in zip(index, outer, strict=True)),
            rows,
            row_nbytes,
            src_pitch,
            dst_pitch,
        )
        for index in itertools.product(*(range(n) for n, _, _ in outer))
    ]


def tiles(copies: Copies, max_nbytes: int) -> tuple[Int64, Int64]:
    """`copies` cut into parts of at most `max_nbytes`, in order, and which of the copies each is part of.

    Returns int64[m, 6] with `Copies`' columns, and int64[m], ascending. Long rows are cut at multiples
    of 128 bytes, so that the parts of an aligned row are aligned. `max_nbytes` is such a multiple.
    """
    assert max_nbytes > 0
    assert max_nbytes % _ALIGNMENT == 0
    table, number = _cut_columns(flattened(copies.table()), max_nbytes)
    table, parent = _cut_rows(table, max_nbytes)
    return table, number[parent]


def _collapsed(
    extent: Sequence[int], itemsize: int, src_strides: Sequence[int], dst_strides: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Bytes of a contiguous row, and what repeats it: (extent, src stride, dst stride), outermost first."""
    # A copy may take its dimensions in any order: the one in which the destination lies joins most.
    axes = sorted(
        ((s, d, n) for n, s, d in zip(extent, src_strides, dst_strides, strict=True) if n > 1),
        key=lambda axis: (axis[1], axis[0]),
    )
    row_nbytes = itemsize
    outer: list[tuple[int, int, int]] = []
    for s, d, n in axes:
        if not outer and s == d == row_nbytes:
            row_nbytes *= n
        elif outer and s == outer[-1][0] * outer[-1][1] and d == outer[-1][0] * outer[-1][2]:
            outer[-1] = (outer[-1][0] * n, *outer[-1][1:])
        else:
            outer.append((n, s, d))
    return row_nbytes, outer[::-1]


def flattened(table: Int64) -> Int64:
    """Copies whose rows follow each other on both sides as one row each."""
    _, _, rows, row_nbytes, src_pitch, dst_pitch = table.T
    straight = (src_pitch == row_nbytes) & (dst_pitch == row_nbytes)
    changed = np.flatnonzero((rows == 1) != straight)
    if not len(changed):
        return table
    flat: Int64 = table.copy()
    flat[changed, 2] = 1
    flat[changed, 3:] = (rows[changed] * row_nbytes[changed])[:, None]
    return flat


def _cut_columns(table: Int64, max_nbytes: int) -> tuple[Int64, Int64]:
    """Rows longer than a tile in equal parts, and which row of `table` each is from."""
    row_nbytes = table[:, 3]
    parts = np.maximum(1, -(-row_nbytes // max_nbytes))
    width = -(-row_nbytes // parts)
    width = np.where(parts > 1, -(-width // _ALIGNMENT) * _ALIGNMENT, width)
    parts = -(-row_nbytes // np.maximum(width, 1))
    if (parts == 1).all():
        return table, np.arange(len(table))
    index, part = repeated(parts)
    cut = table[index]
    at = part * width[index]
    cut[:, 0] += at
    cut[:, 1] += at
    cut[:, 3] = np.minimum(width[index], row_nbytes[index] - at)
    return cut, index


def _cut_rows(table: Int64, max_nbytes: int) -> tuple[Int64, Int64]:
    """Copies of more rows than a tile has room for in parts, and which row of `table` each is from."""
    rows, row_nbytes = table[:, 2], table[:, 3]
    height = np.maximum(1, max_nbytes // np.maximum(row_nbytes, 1))
    parts = -(-rows // height)
    if (parts == 1).all():
        return table, np.arange(len(table))
    index, part = repeated(parts)
    cut = table[index]
    first = part * height[index]
    cut[:, 0] += first * cut[:, 4]
    cut[:, 1] += first * cut[:, 5]
    cut[:, 2] = np.minimum(height[index], rows[index] - first)
    return cut, index


def repeated(parts: Int64) -> tuple[Int64, Int64]:
    """For each part of each row: the row, and the part's number in it."""
    index = np.repeat(np.arange(len(parts)), parts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
