"""Finds the copies that a kernel can digest as it makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.memory.kernels.digest_tiles import TILE_NBYTES, UNIT_NBYTES
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.copies import Copies, cut, flattened
from weightsync.plan.layout.layout import Bool, Int64


@dataclass(frozen=True, slots=True, eq=False)
class ReadBack:
    """Copies that one kernel makes and digests, and the remaining copies and digests.

    Attributes:
        pairs: int64[m, 10], rows of whole units of 16 bytes. Columns are as in `digest_runs`, then src and
            src_pitch: rows are copied from `src` to `address`, and digested there.
        copies: all other copies.
        runs: int64[n, 8], the runs that `pairs` does not write.
    """

    pairs: Int64
    copies: Copies
    runs: Int64

    @classmethod
    def find(cls, copies: Copies, runs: Int64) -> ReadBack:
        """Pair copies with the runs that they write.

        A run is paired if such copies write the whole run. Copies of one row are cut at the begins and ends
        of runs. The order does not change.

        Args:
            copies: between addresses. No two write the same byte.
            runs: as of `digest_runs`.
        """
        runs = runs[np.argsort(runs[:, 0])]
        pieces = _pieces(copies.table(), np.unique(np.concatenate([runs[:, 0], _ends(runs)])))
        number = np.searchsorted(runs[:, 0], pieces[:, 1], side="right") - 1
        if not len(runs):
            return cls(np.zeros((0, 10), np.int64), Copies(*pieces.T), runs)
        pairs, fits = _paired(pieces, runs[number])
        fits &= number >= 0
        written = np.bincount(number[fits], pairs[fits, 2] * pairs[fits, 3], len(runs)).astype(np.int64)
        whole = written == runs[:, 2] * runs[:, 3]
        fits &= whole[number]
        return cls(pairs[fits], Copies(*pieces[~fits].T), runs[~whole])

    def tiles(self) -> Int64:
        """Cut the pairs into tiles: int64[k, 10]."""
        return cut(self.pairs, TILE_NBYTES, ((0, 4), (1, 5), (8, 9)))[0]


def _ends(runs: Int64) -> Int64:
    """Return the address after each run's last row."""
    address, _, rows, row_nbytes, pitch = runs[:, :5].T
    ends: Int64 = address + (rows - 1) * pitch + row_nbytes
    return ends


def _pieces(table: Int64, points: Int64) -> Int64:
    """Cut copies of one row at the addresses `points` of their targets, which ascend."""
    table = flattened(table)
    begin, end = table[:, 1], table[:, 1] + table[:, 3]
    first = np.searchsorted(points, begin, side="right")
    inside = np.where(table[:, 2] == 1, np.searchsorted(points, end, side="left") - first, 0)
    number, nth = repeated(np.maximum(inside, 0) + 1)
    pieces = table[number]
    at = first[number] + nth
    later, more = nth > 0, nth < inside[number]
    pieces[later, 1] = points[at[later] - 1]
    pieces[:, 0] += pieces[:, 1] - begin[number]
    stop = end[number]
    stop[more] = points[at[more]]
    pieces[:, 3] = np.where(pieces[:, 2] == 1, stop - pieces[:, 1], pieces[:, 3])
    return pieces


def _paired(pieces: Int64, runs: Int64) -> tuple[Int64, Bool]:
    """Pair each piece with a run. Also returns True for pieces that form a pair.

    A run of one row numbers bytes without gaps, so a piece of such a run may have rows of any pitch. A piece
    of another run has whole rows of the run. The piece may be one row, if the run's rows are consecutive.
    """
    src, dst, height, nbytes, src_pitch, dst_pitch = pieces.T
    address, index, rows, row_nbytes, pitch, index_pitch, owner, unused = runs.T
    single, at = rows == 1, dst - address
    straight = ~single & (height == 1) & (pitch == row_nbytes) & (nbytes % row_nbytes == 0)
    height = np.where(straight, nbytes // row_nbytes, height)
    nbytes, src_pitch, dst_pitch = (
        np.where(straight, row_nbytes, each) for each in (nbytes, src_pitch, dst_pitch)
    )
    row, within = np.divmod(at, pitch)
    index = index + np.where(single, at, row * index_pitch)
    index_pitch = np.where(single, dst_pitch, index_pitch)
    inside = np.where(
        single,
        at + (height - 1) * dst_pitch + nbytes <= row_nbytes,
        (within == 0) & (nbytes == row_nbytes) & (row + height <= rows),
    )
    inside &= (height == 1) | single | (dst_pitch == pitch)
    bits = src | dst | nbytes | index
    bits |= np.where(height == 1, 0, src_pitch | dst_pitch | index_pitch)
    columns = (dst, index, height, nbytes, dst_pitch, index_pitch, owner, unused, src, src_pitch)
    fits: Bool = inside & (bits % UNIT_NBYTES == 0)
    return np.stack(columns, axis=1), fits
