"""Finds 2-D copies that together transpose matrices, and cuts these into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.copies import ITEMSIZES, MIN_SIDE, Copies
from weightsync.plan.layout.layout import Bool, Int64


@dataclass(frozen=True, slots=True, eq=False)
class Transposes:
    """M matrices that copies transpose.

    Attributes:
        table: int64[M, 6], the columns of `Copies`: where a matrix is read, row by row. Element c of row r is
            written to ``dst + c * dst_pitch + r * itemsize``.
        itemsize: int64[M], bytes per element.
        first: int64[M], ascending: the number of the first copy that is part of the matrix.
        others: ascending numbers of the copies that are part of no matrix.
    """

    table: Int64
    itemsize: Int64
    first: Int64
    others: Int64

    @classmethod
    def find(cls, copies: Copies, bounds: Sequence[int]) -> Transposes:
        """Find consecutive copies of single elements that make a transposition.

        All matrices have at least `MIN_SIDE` rows and about as many columns. None has copies on both sides
        of one of `bounds`.
        """
        number = _columns_and_rows(copies)
        table = copies.table(number)
        written = table[:, 5] == table[:, 3]  # such a copy writes neighbouring elements, others read them
        linked, step = _links(number, table, written, bounds)
        first, count = _runs(linked, step)
        others = np.ones(len(copies), np.bool_)
        run, nth = repeated(count)
        others[number[first[run] + nth]] = False
        step, written = step[first], written[first]
        src, dst, rows, itemsize, src_pitch, dst_pitch = table[first].T
        columns = np.where(written, count, rows)
        matrices = [
            src,
            dst,
            np.where(written, rows, count),
            columns * itemsize,
            np.where(written, src_pitch, step),
            np.where(written, step, dst_pitch),
        ]
        return cls(np.stack(matrices, axis=1), itemsize, number[first], np.flatnonzero(others))

    def tiles(self, itemsize: int, side: int) -> tuple[Int64, Int64]:
        """Cut the matrices of this `itemsize` into tiles of at most `side` rows and columns.

        Returns the tiles, int64[m, 6] with columns as in `table`, and the first copy of each one's matrix,
        int64[m], ascending.
        """
        of_size = np.flatnonzero(self.itemsize == itemsize)
        width = side * itemsize
        down, across = -(-self.table[of_size, 2] // side), -(-self.table[of_size, 3] // width)
        index, part = repeated(down * across)
        row, column = np.divmod(part, across[index])
        tile = self.table[of_size[index]]
        tile[:, 0] += row * side * tile[:, 4] + column * width
        tile[:, 1] += column * side * tile[:, 5] + row * width
        tile[:, 2] = np.minimum(side, tile[:, 2] - row * side)
        tile[:, 3] = np.minimum(width, tile[:, 3] - column * width)
        return tile, self.first[of_size[index]]


def _columns_and_rows(copies: Copies) -> Int64:
    """Return the numbers of the copies that may be one column or row of a transposed matrix."""
    number = np.flatnonzero(copies.row_nbytes <= max(ITEMSIZES))
    if not len(number):
        return number
    src, dst, rows, itemsize, src_pitch, dst_pitch = copies.table(number).T
    one_side = (src_pitch == itemsize) != (dst_pitch == itemsize)
    aligned = (src | dst | src_pitch | dst_pitch) & (itemsize - 1) == 0
    kept: Int64 = number[(rows >= MIN_SIDE) & one_side & aligned & np.isin(itemsize, ITEMSIZES)]
    return kept


def _links(number: Int64, table: Int64, written: Bool, bounds: Sequence[int]) -> tuple[Bool, Int64]:
    """Find copies that may share a matrix with the next copy, and the step to it: two arrays [n - 1].

    One of the two steps is an element, on the side where the copies' own elements are apart. The other one
    is returned: the pitch of that matrix.
    """
    bound = np.isin(number[1:], np.asarray(bounds, np.int64))
    src_step, dst_step = np.diff(table[:, 0]), np.diff(table[:, 1])
    element = np.where(written[:-1], src_step, dst_step)
    step: Int64 = np.where(written[:-1], dst_step, src_step)
    linked: Bool = (
        (np.diff(number) == 1)
        & ~bound
        & (table[1:, 2:] == table[:-1, 2:]).all(axis=1)
        & (element == table[:-1, 3])
    )
    return linked, step


def _runs(linked: Bool, step: Int64) -> tuple[Int64, Int64]:
    """Return the first copy and the number of copies of each run of links with one step.

    Short runs are left out. Where two of the others meet in a copy, it stays with the first one.
    """
    begins = linked.copy()
    begins[1:] &= ~linked[:-1] | (step[1:] != step[:-1])
    ends = linked.copy()
    ends[:-1] &= ~linked[1:] | (step[1:] != step[:-1])
    first, last = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    long = last - first + 1 >= MIN_SIDE
    first, last = first[long], last[long]
    first[1:] += first[1:] == last[:-1]
    return first, last - first + 1
