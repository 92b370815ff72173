"""Cuts pieces into buckets, and places them there and in send buffers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.plan.layout.layout import Int64
from weightsync.plan.layout.segment import Box

PIECE_ALIGN = 16
"""Bytes: the widest load of a GPU thread."""
RUN_ALIGN = 256
"""Bytes: each run starts as aligned as a fresh allocation."""


def align(nbytes: Int64, to: int) -> Int64:
    return (nbytes + (to - 1)) // to * to


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """n boxes to send, in travel order.

    tensor, trainer: int64[n]; offset, extent: int64[n, D]; nbytes: int64[n];
    unit: int64[n], ascending; pieces of one unit share a bucket.
    """

    tensor: Int64
    trainer: Int64
    offset: Int64
    extent: Int64
    nbytes: Int64
    unit: Int64


def split_large(pieces: Pieces, itemsize: Int64, capacity: int) -> Pieces:
    """Split the pieces of tensors larger than `capacity` bytes; each part is a unit.

    `itemsize` is per tensor. The parts of a tensor's trainers alternate, so that every bucket has a share of
    each trainer and all can stage at the same time.
    """
    sizes = np.bincount(pieces.tensor, align(pieces.nbytes, RUN_ALIGN), len(itemsize))
    large = (sizes > capacity)[pieces.tensor]
    if not large.any():
        return pieces
    parts = [
        _split_tensor(pieces, rows, int(itemsize[pieces.tensor[rows[0]]]), capacity)
        for rows in np.split(np.flatnonzero(large), np.flatnonzero(np.diff(pieces.tensor[large])) + 1)
    ]
    small = np.flatnonzero(~large)
    row = np.concatenate([small, *(rows for rows, _, _ in parts)])
    offset = np.concatenate([pieces.offset[small], *(offset for _, offset, _ in parts)])
    extent = np.concatenate([pieces.extent[small], *(extent for _, _, extent in parts)])
    order = np.argsort(pieces.tensor[row], kind="stable")
    row, offset, extent = row[order], offset[order], extent[order]
    tensor = pieces.tensor[row]
    fresh = large[row]
    fresh[1:] |= tensor[1:] != tensor[:-1]
    nbytes = extent.prod(axis=1) * itemsize[tensor]
    return Pieces(tensor, pieces.trainer[row], offset, extent, nbytes, np.cumsum(fresh))


def _split_tensor(pieces: Pieces, rows: Int64, itemsize: int, capacity: int) -> tuple[Int64, Int64, Int64]:
    """Split one tensor. Returns rows, offsets and extents of the parts, first parts of all pieces first."""
    share = max(RUN_ALIGN, capacity // len(rows) // RUN_ALIGN * RUN_ALIGN)
    parts = [
        (nth, row, part)
        for row, offset, extent in zip(
            rows.tolist(), pieces.offset[rows].tolist(), pieces.extent[rows].tolist(), strict=True
        )
        for nth, part in enumerate(Box(tuple(offset), tuple(extent)).split(share // itemsize))
    ]
    parts.sort(key=lambda entry: entry[0])
    return (
        np.array([row for _, row, _ in parts], np.int64),
        np.array([part.offset for _, _, part in parts], np.int64),
        np.array([part.extent for _, _, part in parts], np.int64),
    )


def cut(unit: Int64, nbytes: Int64, capacity: int) -> Int64:
    """Return the bucket of each piece, int64[n]. Arguments are as in `Pieces`.

    Units fill buckets in order, as many as fit. Each piece is counted like a run. This count is never less
    than the piece's space in the bucket, and more by at most 240 bytes.
    """
    unit = np.cumsum(np.diff(unit, prepend=unit[:1]) != 0)
    filled = np.cumsum(np.bincount(unit, align(nbytes, RUN_ALIGN)).astype(np.int64))
    starts = [0]
    while starts[-1] < len(filled):
        before = int(filled[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(filled.searchsorted(before + capacity, side="right")))
    return np.searchsorted(np.array(starts[1:], np.int64), unit, side="right")


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Each run has the pieces of one trainer in one bucket. Ordered by bucket, then root, then trainer.

    order: int64[n], pieces by run, inside a run in travel order; bounds: int64[num_runs + 1], a
    run's first piece; bucket, trainer, offset (in the bucket), nbytes, send_buffer_offset: int64[num_runs].
    """

    order: Int64
    bounds: Int64
    bucket: Int64
    trainer: Int64
    offset: Int64
    nbytes: Int64
    send_buffer_offset: Int64


def arrange(bucket: Int64, trainer: Int64, nbytes: Int64, roots: Int64) -> Runs:
    """Place pieces of `nbytes`, given in travel order; `roots` are holders, int64[num_trainers]."""
    turn = np.argsort(np.argsort(roots, kind="stable"))
    key = bucket * len(roots) + turn[trainer]
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    run_bucket, run_trainer = bucket[order[first]], trainer[order[first]]
    sizes = np.add.reduceat(align(nbytes, PIECE_ALIGN)[order], first) if len(first) else first
    slots = align(sizes, RUN_ALIGN)
    by_trainer = np.argsort(run_trainer, kind="stable")
    send_buffer_offset = np.empty_like(slots)
    send_buffer_offset[by_trainer] = _restart(slots[by_trainer], run_trainer[by_trainer])
    bounds = np.append(first, len(order))
    return Runs(
        order, bounds, run_bucket, run_trainer, _restart(slots, run_bucket), sizes, send_buffer_offset
    )


def _restart(sizes: Int64, group: Int64) -> Int64:
    """Return running offsets that restart at 0 with each group."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    first = np.flatnonzero(np.diff(group, prepend=-1))
    return starts - np.repeat(starts[first], np.diff(np.append(first, len(group))))
