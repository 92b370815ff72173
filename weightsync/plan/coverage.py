"""Proof that boxes tile their tensors: no gap, no overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.buffers import Int64
from weightsync.plan.tensors import TensorMeta

__all__ = ["check_tiling", "first_element"]


def first_element(offset: Int64, shape: Int64) -> Int64:
    """Row-major index of each box's first element. offset, shape: int64[n, D] -> int64[n]."""
    flat: Int64 = offset[:, 0].copy()
    for dim in range(1, offset.shape[1]):
        flat *= shape[:, dim]
        flat += offset[:, dim]
    return flat


def check_tiling(
    tensors: Sequence[TensorMeta], shape: Int64, tensor: Int64, offset: Int64, extent: Int64
) -> None:
    """Proves that the boxes of each tensor hold each of its elements exactly once.

    Args:
        tensors: T tensors, with `shape` int64[T, D] (padded with 1).
        tensor: int64[n], ascending; per tensor the boxes are ordered by their first element.
        offset, extent: int64[n, D]; no box is empty, none reaches out of its tensor.

    Raises:
        PlanError: names the first tensor that is not tiled and the first box at fault.
    """
    counts = np.bincount(tensor, minlength=len(tensors))
    bad = (counts == 0) & (shape > 0).all(axis=1)
    held = np.flatnonzero(counts)
    if len(held):
        starts = np.cumsum(counts)[held] - counts[held]
        partial = np.logical_or.reduceat(extent != shape[tensor], starts, axis=0)
        chained = partial.sum(axis=1) <= 1
        bad[held] = _broken_chains(partial.argmax(axis=1), starts, counts[held], shape[held], offset, extent)
        if not chained.all():
            bad[held[~chained]] = False
            rows = np.repeat(~chained, counts[held])
            dims = partial[~chained].any(axis=0)
            bad[
                _unequal_corners(shape[:, dims], tensor[rows], offset[rows][:, dims], extent[rows][:, dims])
            ] = True
    if bad.any():
        number = int(bad.argmax())
        rows = tensor == number
        _explain(tensors[number], offset[rows], extent[rows])


def _broken_chains(
    axis: Int64, starts: Int64, counts: Int64, shape: Int64, offset: Int64, extent: Int64
) -> npt.NDArray[np.bool_]:
    """Which tensors, cut along `axis` only, have boxes that do not follow one another."""
    rows = np.arange(len(offset))
    along = np.repeat(axis, counts)
    low = offset[rows, along]
    high = low + extent[rows, along]
    expected = np.empty_like(low)
    expected[1:] = high[:-1]
    expected[starts] = 0
    broken: npt.NDArray[np.bool_] = np.logical_or.reduceat(low != expected, starts)
    broken |= high[starts + counts - 1] != shape[np.arange(len(shape)), axis]
    return broken


def _unequal_corners(shape: Int64, tensor: Int64, offset: Int64, extent: Int64) -> Int64:
    """Tensors whose boxes do not add up to the whole; repeats possible.

    Exact for any arrangement: a function on the grid is determined by its mixed differences, and
    those of a box's indicator are +1 or -1 at its 2^D corners. So boxes add up to "once everywhere"
    if and only if their signed corners cancel against those of the whole tensor.
    """
    whole = np.unique(tensor)
    owner = np.concatenate([tensor, whole])
    low = np.concatenate([offset, np.zeros_like(shape[whole])])
    high = np.concatenate([offset + extent, shape[whole]])
    weight = np.concatenate([np.ones(len(tensor), np.int64), np.full(len(whole), -1)])
    grid = np.prod(shape + 1, axis=1)
    base = np.cumsum(grid) - grid
    keys, signs = [], []
    for picks in itertools.product((False, True), repeat=shape.shape[1]):
        corner = np.where(np.array(picks), high, low)
        keys.append(base[owner] + first_element(corner, shape[owner] + 1))
        signs.append(weight * (-1) ** sum(picks))
    key = np.concatenate(keys)
    order = np.argsort(key)
    firsts = np.flatnonzero(np.diff(key[order], prepend=-1))
    left = np.add.reduceat(np.concatenate(signs)[order], firsts) != 0
    owners: Int64 = np.searchsorted(base, key[order][firsts[left]], side="right") - 1
    return owners


def _explain(meta: TensorMeta, offset: Int64, extent: Int64) -> None:
    """Raises with the first cell, in row-major order, that is held never or more than once."""
    ndim = len(meta.shape)
    low, high = offset[:, :ndim], offset[:, :ndim] + extent[:, :ndim]
    cuts = [
        np.unique(np.concatenate([[0, size], low[:, dim], high[:, dim]]))
        for dim, size in enumerate(meta.shape)
    ]
    held = np.zeros([len(cut) - 1 for cut in cuts], np.int64)
    for first, last in zip(low, high, strict=True):
        cell = tuple(slice(*np.searchsorted(c, [a, b])) for c, a, b in zip(cuts, first, last, strict=True))
        held[cell] += 1
    where = np.unravel_index(int((held != 1).argmax()), held.shape)
    at = tuple(int(cut[i]) for cut, i in zip(cuts, where, strict=True))
    size = tuple(int(cut[i + 1] - cut[i]) for cut, i in zip(cuts, where, strict=True))
    if held[where]:
        raise PlanError(
            meta.name,
            f"{int(held[where])} different boxes hold the elements at {at}, extent {size}, of shape "
            f"{meta.shape}; boxes must be identical (replicas) or apart",
        )
    raise PlanError(
        meta.name,
        f"no trainer holds the elements at {at}, extent {size}, of shape {meta.shape}; "
        "declare the missing segment",
    )
