"""Turns copies of N-dimensional boxes into 2-D copies between byte addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.layout import Bool, Int64, padded

Copy = tuple[int, int, int, int, int, int]
"""src, dst, rows, row_nbytes, src_pitch, dst_pitch: see `Copies`."""

BoxCopy = tuple[Sequence[int], int, int, Sequence[int], int, Sequence[int]]
"""extent, itemsize, src, src_strides, dst, dst_strides: elements, addresses of the first one, and bytes."""

ITEMSIZES = (1, 2, 4, 8)
"""Bytes of elements whose transpositions `weightsync.plan.layout.transposes` finds."""

MIN_SIDE = 32
"""The fewest rows and columns of a matrix for which transposing it in tiles is worth while."""

_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """n copies of `rows` rows of `row_nbytes` bytes; columns int64[n].

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
        """Make columns from `copies`, in their order."""
        return cls(*np.array(copies, dtype=np.int64).reshape(-1, 6).T)

    def __len__(self) -> int:
        return len(self.src)

    def table(self, rows: Int64 | slice = slice(None)) -> Int64:
        """Return int64[n, 6], the columns side by side, or those `rows` of it."""
        return np.stack([getattr(self, field.name)[rows] for field in fields(Copies)], axis=1)


def concatenated(parts: Sequence[Copies]) -> Copies:
    """Return the copies of all parts, in order. There must be at least one part."""
    return Copies(
        *(np.concatenate([getattr(each, field.name) for each in parts]) for field in fields(Copies))
    )


def box_copies(boxes: Sequence[BoxCopy]) -> tuple[Int64, Int64]:
    """Turn N-dimensional boxes, also of different N, into few 2-D copies.

    Returns the copies, int64[m, 6] with the columns of `Copies`, and the box of each copy, int64[m],
    ascending. A 0-d box is one element, an empty box needs no copies.
    """
    extents, itemsize, src, src_strides, dst, dst_strides = zip(*boxes, strict=True) if boxes else [()] * 6
    ndim = max([1, *map(len, extents)])
    extent = padded(extents, ndim, 1)
    starts = (np.array(column, np.int64) for column in (itemsize, src, dst))
    strides = (padded(column, ndim, 0) for column in (src_strides, dst_strides))
    table, parent = strided_copies(extent, *starts, *strides)
    kept = np.flatnonzero((extent[parent] > 0).all(axis=1))
    return table[kept], parent[kept]


def tiles(copies: Copies, max_nbytes: int) -> tuple[Int64, Int64]:
    """Cut `copies` into parts of at most `max_nbytes`, in order.

    Returns the parts, int64[m, 6] with the columns of `Copies`, and the copy that each comes from, int64[m],
    ascending. Long rows are cut at multiples of 128 bytes, so that parts of an aligned row are aligned.
    `max_nbytes` must be such a multiple.
    """
    return cut(flattened(copies.table()), max_nbytes)


def cut(
    table: Int64, max_nbytes: int, sides: Sequence[tuple[int, int]] = ((0, 4), (1, 5))
) -> tuple[Int64, Int64]:
    """Cut a table of copies like `tiles`, without joining rows that are contiguous on both sides.

    `sides` are the columns of an address and of the address's pitch. All other columns after the first 4 are
    copied to the parts of a row.
    """
    assert max_nbytes > 0
    assert max_nbytes % _ALIGNMENT == 0
    rows, row_nbytes = table[:, 2], table[:, 3]
    # Rows longer than a part are cut into equal ones, and only these. Else a part has several rows.
    across = np.maximum(1, -(-row_nbytes // max_nbytes))
    width = -(-row_nbytes // across)
    width = np.where(across > 1, -(-width // _ALIGNMENT) * _ALIGNMENT, width)
    across = -(-row_nbytes // np.maximum(width, 1))
    height = np.maximum(1, max_nbytes // np.maximum(width, 1))
    down = -(-rows // height)
    parts = across * down
    if (parts == 1).all():
        return table, np.arange(len(table))
    index, number = repeated(parts)
    column, row = _steps(number, parts, across, down)
    found = np.repeat(table, parts, axis=0)  # much faster than by index
    column *= np.repeat(width, parts)
    row *= np.repeat(height, parts)
    for address, pitch in sides:
        found[:, address] += column + row * found[:, pitch]
    found[:, 2] = np.minimum(np.repeat(height, parts), found[:, 2] - row)
    found[:, 3] = np.minimum(np.repeat(width, parts), found[:, 3] - column)
    return found, index


def _steps(number: Int64, parts: Int64, across: Int64, down: Int64) -> tuple[Int64, Int64]:
    """Return how far right and how far down each part is. Parts of one column follow each other."""
    is_wide, is_high = np.repeat(across > 1, parts), np.repeat(down > 1, parts)
    column, row = np.where(is_wide, number, 0), np.where(is_high, number, 0)
    if len(both := np.flatnonzero(is_wide & is_high)):
        column[both], row[both] = np.divmod(number[both], np.repeat(down, parts)[both])
    return column, row


def flattened(table: Int64) -> Int64:
    """Make one row of a copy's rows if they are contiguous on both sides. Columns after the sixth stay."""
    _, _, rows, row_nbytes, src_pitch, dst_pitch = table[:, :6].T
    straight = (src_pitch == row_nbytes) & (dst_pitch == row_nbytes)
    changed = np.flatnonzero((rows == 1) != straight)
    if not len(changed):
        return table
    flat: Int64 = table.copy()
    flat[changed, 2] = 1
    flat[changed, 3:6] = (rows[changed] * row_nbytes[changed])[:, None]
    return flat


def stable_order(code: Int64) -> Int64:
    """Return the order of `code`, which has no negative numbers. Equal ones stay in their order."""
    bits = max(1, len(code) - 1).bit_length()
    if int(code.max(initial=0)).bit_length() + bits > 63:
        return np.argsort(code, kind="stable")
    found: Int64 = np.sort(code << bits | np.arange(len(code)))  # much faster than a stable argsort
    return found & ((1 << bits) - 1)


_NO_STRIDE = np.iinfo(np.int64).max


def strided_copies(
    extent: Int64, itemsize: Int64, src: Int64, dst: Int64, src_strides: Int64, dst_strides: Int64
) -> tuple[Int64, Int64]:
    """Make copies like `box_copies` for columns of n boxes that are not empty.

    Rows must be contiguous on both sides.

    A box's copies follow each other as in the target, from the outermost dimension on. So copies that are
    columns or rows of one transposed matrix are consecutive.

    Args:
        extent: int64[n, D], elements; src_strides, dst_strides: int64[n, D], bytes.
        itemsize, src, dst: int64[n].
    """
    first, shape = _shapes(extent, itemsize[:, None], src_strides, dst_strides)
    row_nbytes, outer = _collapsed_boxes(
        *(each[first] for each in (extent, itemsize, src_strides, dst_strides))
    )
    every, chosen = np.arange(len(first)), _row_loop(row_nbytes, *outer)
    rows, src_pitch, dst_pitch = (column[every, chosen] for column in outer)
    alike = (each[shape] for each in (rows, row_nbytes, src_pitch, dst_pitch))
    table = np.stack([src, dst, *alike], axis=1)
    parent: Int64 = np.arange(len(extent))
    for dim in reversed(range(extent.shape[1])):
        times = np.where(chosen == dim, 1, outer[0][:, dim])
        if (times == 1).all():
            continue
        index, nth = repeated(times[shape[parent]])
        table, parent = table[index], parent[index]
        table[:, 0] += nth * outer[1][shape[parent], dim]
        table[:, 1] += nth * outer[2][shape[parent], dim]
    return flattened(table), parent


def _shapes(*columns: Int64) -> tuple[Int64, Int64]:
    """Number the runs of equal rows, [n, k], since boxes of one tensor are mostly alike.

    Returns the first row of each run, and each row's run.
    """
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = False
    for column in columns:
        for each in column.T:
            changed[1:] |= each[1:] != each[:-1]
    return np.flatnonzero(changed), np.cumsum(changed) - 1


def _row_loop(row_nbytes: Int64, counts: Int64, src: Int64, dst: Int64) -> Int64:
    """Return the loop that becomes the rows of each box's copies: the longest one.

    In a stack of transposed matrices it is the longer one of a matrix, however many there are.
    """
    longest: Int64 = counts.argmax(axis=1)
    boxes = np.flatnonzero(np.isin(row_nbytes, ITEMSIZES))
    if not len(boxes):
        return longest
    itemsize, counts = row_nbytes[boxes, None], counts[boxes]
    reads, writes = ((side[boxes] == itemsize) & (counts >= MIN_SIDE) for side in (src, dst))
    transposed = reads.any(axis=1) & writes.any(axis=1)
    of_matrix = np.where(reads | writes, counts, 0).argmax(axis=1)
    longest[boxes] = np.where(transposed, of_matrix, longest[boxes])
    return longest


def _collapsed_boxes(
    extent: Int64, itemsize: Int64, src_strides: Int64, dst_strides: Int64
) -> tuple[Int64, tuple[Int64, Int64, Int64]]:
    """Return bytes per contiguous row, and the loops over rows.

    Loops are columns of extents, src strides and dst strides; unused ones are 1, 0 and 0. Dimensions may be
    copied in any order; the destination's order joins the most of them.
    """
    long = extent > 1
    inward = np.argsort(np.where(long, dst_strides, _NO_STRIDE), axis=1, kind="stable")
    every = np.arange(len(extent))
    row_nbytes, depth = itemsize.copy(), np.zeros(len(extent), np.int64)
    counts = np.ones((len(extent), extent.shape[1] + 1), np.int64)  # the last column takes the writes
    src, dst = np.zeros_like(counts), np.zeros_like(counts)  # of rows that have nothing to push
    for axis in inward.T:
        n, s, d = extent[every, axis], src_strides[every, axis], dst_strides[every, axis]
        top = np.maximum(depth - 1, 0)
        whole = (depth == 0) & (s == row_nbytes) & (d == row_nbytes)
        row_nbytes *= np.where(whole, n, 1)
        span = counts[every, top]
        longer = (depth > 0) & (s == src[every, top] * span) & (d == dst[every, top] * span)
        counts[every, top] = np.where(longer, span * n, span)
        new = (n > 1) & ~whole & ~longer
        at = np.where(new, depth, extent.shape[1])
        counts[every, at], src[every, at], dst[every, at] = n, s, d
        depth += new
    return row_nbytes, (counts[:, :-1], src[:, :-1], dst[:, :-1])


def join(lane: Int64, table: Int64) -> tuple[Int64, Int64]:
    """Join copies of one lane that continue each other.

    Args:
        lane: int64[n], a number for each pair of source and target memory; lanes are never joined.
        table: int64[n, 6].

    Returns:
        Both, ordered by lane, then by target address.
    """
    order = np.lexsort((table[:, 1], lane))
    lane, table = lane[order], table[order]
    while (lane[1:] == lane[:-1]).any():
        num_copies = len(table)
        first = np.flatnonzero(~_adjacent(lane, table))
        if len(first) < len(table):
            lane, table = lane[first], flattened(_widened(table, first))
        first, pitch = _below(lane, table)
        if len(first) < len(table):
            lane, table = lane[first], flattened(_deepened(table, first, pitch))
        if len(table) == num_copies:
            break
    return lane, table


def _adjacent(lane: Int64, table: Int64) -> Bool:
    """Return True if each copy's rows continue the rows of the copy before it."""
    before, after = table[:-1], table[1:]
    on = np.zeros(len(table), np.bool_)
    on[1:] = (
        (lane[1:] == lane[:-1])
        & (after[:, 0] == before[:, 0] + before[:, 3])
        & (after[:, 1] == before[:, 1] + before[:, 3])
        & (after[:, 2] == before[:, 2])
        & ((after[:, 2] == 1) | (after[:, 4:] == before[:, 4:]).all(axis=1))
    )
    return on


def _widened(table: Int64, first: Int64) -> Int64:
    """Join adjacent copies into longer rows. `first` has the first row of each joined copy."""
    joined: Int64 = table[first]
    if len(first):
        joined[:, 3] = np.add.reduceat(table[:, 3], first)
    return joined


def _below(lane: Int64, table: Int64) -> tuple[Int64, Int64]:
    """Find copies whose rows continue the copy before at that copy's pitch.

    Returns the first row of `table` of each joined copy, int64[m], and the pitches, int64[m, 2].
    """
    before, after = table[:-1], table[1:]
    last_row = before[:, :2] + (before[:, 2:3] - 1) * before[:, 4:]
    gap = after[:, :2] - last_row
    on = (lane[1:] == lane[:-1]) & (after[:, 3] == before[:, 3]) & (gap >= after[:, 3:4]).all(axis=1)
    for side in (before, after):
        on &= (side[:, 2] == 1) | (side[:, 4:] == gap).all(axis=1)
    on &= _apart(on, gap)
    first = np.flatnonzero(np.concatenate([[True], ~on])[: len(table)])
    pitch = table[first, 4:]
    starts = np.flatnonzero(on & ~np.concatenate([[False], on])[: len(on)])
    pitch[np.searchsorted(first, starts)] = gap[starts]
    return first, pitch


def _apart(on: Bool, gap: Int64) -> Bool:
    """Drop links, so that no two remaining links of different gaps share a copy.

    Consecutive links of one gap are a run. Of consecutive runs, every second one loses the links at which it
    meets another run.
    """
    same = np.zeros(len(on) + 1, np.bool_)  # link i has the gap of link i - 1
    meets = np.zeros(len(on) + 1, np.bool_)  # link i and link i - 1 share a copy
    meets[1:-1] = on[1:] & on[:-1]
    same[1:-1] = meets[1:-1] & (gap[1:] == gap[:-1]).all(axis=1)
    changes = meets & ~same
    number = np.cumsum(changes[:-1])
    stretch = np.flatnonzero(~meets[:-1])
    base = np.repeat(number[stretch], np.diff(np.append(stretch, len(on))))
    odd = (number - base) % 2 == 1
    kept: Bool = ~(odd & (changes[:-1] | changes[1:]))
    return kept


def _deepened(table: Int64, first: Int64, pitch: Int64) -> Int64:
    """Join stacked copies into copies with more rows. `first` has the first row of each joined copy."""
    joined: Int64 = table[first]
    if len(first):
        joined[:, 2] = np.add.reduceat(table[:, 2], first)
    joined[:, 4:] = pitch
    return joined
