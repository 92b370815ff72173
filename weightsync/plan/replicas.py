"""Which of several identical copies is sent."""

from __future__ import annotations

import numpy as np

from weightsync.plan.buffers import Int64

__all__ = ["choose"]


def choose(start: Int64, size: Int64, rank: Int64, nbytes: Int64, num_ranks: int) -> Int64:
    """One row per group of replicas, so that the ranks send about the same number of bytes.

    Group g is rows `start[g]` to `start[g] + size[g]`, each row on another `rank`, ascending;
    `nbytes` is per group, positive. Returns int64[num_groups]. Groups that the same ranks hold
    are dealt together: by falling size, each to the least loaded rank. Deterministic.
    """
    chosen: Int64 = start.copy()
    alone = size == 1
    loads = np.bincount(rank[start[alone]], nbytes[alone], num_ranks).astype(np.int64)
    for count in np.unique(size[~alone]).tolist():
        groups = np.flatnonzero(size == count)
        holders = rank[start[groups, None] + np.arange(count)]
        kind = _same_rows(holders, num_ranks)
        for members in np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1]):
            ranks = holders[members[0]]
            picks, loads[ranks] = _deal(nbytes[groups[members]], loads[ranks])
            chosen[groups[members]] += picks
    return chosen


def _same_rows(rows: Int64, limit: int) -> Int64:
    """A number per row, the same for equal rows, from 0; values are below `limit`."""
    code: Int64 = rows[:, 0].copy()
    for column in rows.T[1:]:
        code = np.unique(code * limit + column, return_inverse=True)[1]
    numbers: Int64 = np.unique(code, return_inverse=True)[1]
    return numbers


def _deal(nbytes: Int64, loads: Int64) -> tuple[Int64, Int64]:
    """Gives each of the items to one of the loads; the picks and the new loads."""
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
    """How many units go to each load, when each goes to the least loaded one."""
    rising = np.sort(loads)
    filled = np.arange(1, len(loads) + 1)
    level = int(((np.cumsum(rising) + num_units * unit) // filled).min())
    counts = np.maximum(level - loads, 0) // unit
    rest = num_units - int(counts.sum())
    counts[np.argsort(loads + counts * unit, kind="stable")[:rest]] += 1
    return counts


def _interleave(counts: Int64) -> Int64:
    """`counts[i]` times i, spread evenly: neighbours in travel order come from different ranks."""
    owner = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner[np.argsort((nth + 0.5) / counts[owner], kind="stable")]
