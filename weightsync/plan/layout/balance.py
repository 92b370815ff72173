"""Balances bytes: partitions the boxes of files, and chooses which replica is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.layout import Int64
from weightsync.plan.layout.segment import Box

_WHOLE_NBYTES = 1 << 20
"""A box is not split if the parts would be smaller than this."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """`box` of `tensor`, in row-major order, starting at byte `start` of buffer number `buffer`."""

    tensor: str
    box: Box
    itemsize: int
    buffer: int
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def split(self, num_parts: int) -> Iterator[Stretch]:
        """Split into at most `num_parts` runs of rows; tails may be shorter."""
        axis = next((a for a, extent in enumerate(self.box.extent) if extent > 1), None)
        if axis is None or num_parts == 1:
            yield self
            return
        rows = -(-self.box.extent[axis] // num_parts)
        start = self.start
        for box in self.box.split(rows * prod(self.box.extent[axis + 1 :])):
            yield Stretch(self.tensor, box, self.itemsize, self.buffer, start)
            start += box.numel * self.itemsize


def partition(stretches: Sequence[Stretch], num_shares: int) -> list[list[Stretch]]:
    """Partition `stretches` into `num_shares` shares of about equal bytes.

    Each share has rows of every large box, so that each bucket comes from all shares. Shares only depend on
    tensors and boxes, not on files: checkpoints of one model get the same shares. Boxes without elements are
    left out.
    """
    shares: list[list[Stretch]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for stretch in sorted(stretches, key=lambda each: (each.tensor, each.box.offset)):
        if not stretch.nbytes:
            continue
        whole = stretch.nbytes < _WHOLE_NBYTES * num_shares
        order = sorted(range(num_shares), key=loads.__getitem__)
        for share, part in zip(order, stretch.split(1 if whole else num_shares), strict=False):
            shares[share].append(part)
            loads[share] += part.nbytes
    return shares


def choose(start: Int64, size: Int64, rank: Int64, nbytes: Int64, num_ranks: int) -> Int64:
    """Choose one row per group of replicas, so that ranks send about equal bytes.

    Group g is rows `start[g]` to `start[g] + size[g]`, on different ranks, with `rank` ascending. `nbytes` is
    per group and positive. Returns int64[num_groups]. Groups held by the same ranks are assigned together: by
    falling size, always to the least loaded rank. Deterministic.
    """
    chosen: Int64 = start.copy()
    alone = size == 1
    loads = np.bincount(rank[start[alone]], nbytes[alone], num_ranks).astype(np.int64)
    known: dict[tuple[bytes, bytes], tuple[Int64, Int64]] = {}  # most ranks hold as much as others
    for count in np.unique(size[~alone]).tolist():
        groups = np.flatnonzero(size == count)
        holders = rank[start[groups, None] + np.arange(count)]
        kind = _same_rows(holders, num_ranks)
        for members in np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1]):
            ranks = holders[members[0]]
            its, held = nbytes[groups[members]], loads[ranks]
            key = its.tobytes(), held.tobytes()
            if key not in known:
                known[key] = spread(its, held)
            picks, loads[ranks] = known[key]
            chosen[groups[members]] += picks
    return chosen


def _same_rows(rows: Int64, limit: int) -> Int64:
    """Number the distinct rows from 0; equal rows get the same number. Values are below `limit`."""
    if (rows == rows[:1]).all():  # of a thousand ranks, columns take long
        return np.zeros(len(rows), np.int64)
    code: Int64 = rows[:, 0].copy()
    for column in rows.T[1:]:
        code = np.unique(code * limit + column, return_inverse=True)[1]
    numbers: Int64 = np.unique(code, return_inverse=True)[1]
    return numbers


def spread(nbytes: Int64, loads: Int64) -> tuple[Int64, Int64]:
    """Assign each item to one of the loads, by falling size. Returns the picks and the new loads."""
    order = np.argsort(-nbytes, kind="stable")
    picks = np.empty(len(nbytes), np.int64)
    bounds = np.flatnonzero(np.diff(nbytes[order], prepend=-1, append=-1))
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        unit = int(nbytes[order[first]])
        counts = _fill(loads, unit, last - first)
        picks[order[first:last]] = _interleave(counts)
        loads = loads + counts * unit
    return picks, loads


def _fill(loads: Int64, unit: int, num_units: int) -> Int64:
    """Count the units per load if every unit goes to the least loaded one."""
    rising = np.sort(loads)
    filled = np.arange(1, len(loads) + 1)
    level = int(((np.cumsum(rising) + num_units * unit) // filled).min())
    counts = np.maximum(level - loads, 0) // unit
    rest = num_units - int(counts.sum())
    counts[np.argsort(loads + counts * unit, kind="stable")[:rest]] += 1
    return counts


def _interleave(counts: Int64) -> Int64:
    """Repeat each i `counts[i]` times, spread evenly: neighbours in travel order differ in rank."""
    owner, nth = repeated(counts)
    return owner[np.argsort((nth + 0.5) / counts[owner], kind="stable")]
