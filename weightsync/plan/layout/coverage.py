"""Proves that boxes tile their tensors, and segments their buffers: no gap, no overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.layout import Int64, Layout, columns, take
from weightsync.plan.layout.segment import DTYPES, TensorMeta, suggest


def first_element(offset: Int64, shape: Int64) -> Int64:
    """Return the row-major index of each box's first element. offset, shape: int64[n, D] -> int64[n]."""
    flat: Int64 = offset[:, 0].copy()
    for dim in range(1, offset.shape[1]):
        flat *= shape[:, dim]
        flat += offset[:, dim]
    return flat


def covers_all(layout: Layout) -> bool:
    """Return True if the boxes of all ranks, without replicas, have as many elements as their tensors."""
    boxes = np.unique(np.column_stack([layout.tensor, layout.offset, layout.extent]), axis=0)
    numel = np.prod(boxes[:, -layout.extent.shape[1] :], axis=1)
    held = np.zeros(len(layout.tensors), np.int64)
    np.add.at(held, boxes[:, 0], numel)
    return bool((held == np.prod(layout.shape, axis=1)).all())


def check_tiling(
    tensors: Sequence[TensorMeta], shape: Int64, tensor: Int64, offset: Int64, extent: Int64, rank: Int64
) -> None:
    """Prove that the boxes of each tensor hold every element of the tensor exactly once.

    Args:
        tensors: T tensors, with `shape` int64[T, D] (padded with 1).
        tensor: int64[n], ascending; per tensor the boxes are ordered by their first element.
        offset, extent: int64[n, D]; no box is empty, and no box reaches out of its tensor.
        rank: int64[n], a trainer rank that holds the box.

    Raises:
        PlanError: names the first tensor that is not tiled, where, and two ranks whose boxes overlap.
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
        _explain(tensors[number], offset[rows], extent[rows], rank[rows])


def _broken_chains(
    axis: Int64, starts: Int64, counts: Int64, shape: Int64, offset: Int64, extent: Int64
) -> npt.NDArray[np.bool_]:
    """Find tensors, cut along `axis` only, whose boxes do not follow one another."""
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
    """Find tensors whose boxes do not add up to the whole. May repeat a tensor.

    This is exact for any arrangement. A function on the grid is determined by its mixed differences, and the
    mixed differences of a box's indicator are +1 or -1 at the 2^D corners of the box. So boxes add up to
    "once everywhere" if and only if their signed corners cancel against the corners of the whole tensor.
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


def _explain(meta: TensorMeta, offset: Int64, extent: Int64, rank: Int64) -> None:
    """Raise PlanError for the first row-major cell that is not held exactly once."""
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
        over = np.flatnonzero(((low <= at) & (high > at)).all(axis=1))
        columns = (each[over].tolist() for each in (rank, low, high))
        boxes = [f"rank {owner} holds {first} to {end}" for owner, first, end in zip(*columns, strict=True)]
        raise PlanError(
            meta.name,
            f"{len(over)} different boxes hold the elements at {at}, extent {size}, of shape {meta.shape}: "
            f"trainer {' and '.join(boxes[:2])}; boxes must be identical (replicas) or apart",
        )
    raise PlanError(
        meta.name,
        f"no trainer holds the elements at {at}, extent {size}, of shape {meta.shape}; "
        "declare the missing segment",
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """Contiguous runs of bytes, each repeated over strided dimensions.

    buffer: int64[n]; offset, nbytes: int64[n]; strides, counts: int64[n, D], innermost first,
    unused dimensions last with stride 0 and count 1.
    """

    buffer: Int64
    offset: Int64
    nbytes: Int64
    strides: Int64
    counts: Int64


def check_live(engine: str, layout: Layout) -> None:
    """Prove that segments and padding cover each byte of each declared buffer exactly once.

    Ranks that declare no buffers are not checked.

    Raises:
        PlanError: names the buffer, the rank and the first byte at fault.
    """
    if not layout.live.metas:
        return
    sides = columns(_segment_runs(engine, layout)), columns(_padding_runs(layout))
    runs = _Runs(*map(np.concatenate, zip(*(side.values() for side in sides), strict=True)))
    last = runs.offset + ((runs.counts - 1) * runs.strides).sum(axis=1) + runs.nbytes
    out = (runs.offset < 0) | (last > layout.live.nbytes[runs.buffer])
    if out.any():
        row = int(out.argmax())
        problem = f"bytes {int(runs.offset[row])} to {int(last[row])} lie outside"
        _refuse(engine, layout, int(runs.buffer[row]), problem)
    _check_chain(engine, layout, _expand(_collapse(runs)))


def _segment_runs(engine: str, layout: Layout) -> _Runs:
    checked = np.zeros(layout.num_ranks, np.bool_)
    checked[layout.live.key // layout.live.num_names] = True
    rows = np.flatnonzero(checked[layout.rank] & (layout.extent > 0).all(axis=1))
    buffer = layout.live.find(layout.rank[rows], layout.buffer[rows])
    if (buffer < 0).any():
        _explain_unknown(engine, layout, int(rows[(buffer < 0).argmax()]))
    _check_dtypes(engine, layout, rows, buffer)
    counts = layout.extent[rows]
    strides = np.where(counts > 1, layout.strides[rows], 0)
    if (strides < 0).any() or ((strides == 0) & (counts > 1)).any():
        row = int(((strides < 0) | ((strides == 0) & (counts > 1))).any(axis=1).argmax())
        shown = tuple(layout.strides[rows[row]].tolist())
        _refuse(engine, layout, int(buffer[row]), f"a segment has strides {shown}, which must be positive")
    inward = np.argsort(np.where(counts > 1, strides, np.iinfo(np.int64).max), axis=1, kind="stable")
    return _Runs(
        buffer,
        layout.byte_offset[rows],
        layout.itemsize[layout.tensor[rows]],
        np.take_along_axis(strides, inward, axis=1),
        np.take_along_axis(counts, inward, axis=1),
    )


def _check_dtypes(engine: str, layout: Layout, rows: Int64, buffer: Int64) -> None:
    """Check that each parameter has the dtype of its tensors or is raw bytes. Bytes are not cast."""
    ours, live = layout.dtype[layout.tensor[rows]], layout.live.dtype[buffer]
    bad = (ours != live) & (live != DTYPES["uint8"])
    if bad.any():
        row = int(bad.argmax())
        meta = layout.tensors[int(layout.tensor[rows[row]])]
        _refuse(engine, layout, int(buffer[row]), f"its dtype is not {meta.dtype}, the dtype of {meta.name}")


def _padding_runs(layout: Layout) -> _Runs:
    live = layout.live
    shape = (len(live.pad_buffer), layout.extent.shape[1])
    return _Runs(
        live.pad_buffer, live.pad_offset, live.pad_nbytes, np.zeros(shape, np.int64), np.ones(shape, np.int64)
    )


def _collapse(runs: _Runs) -> _Runs:
    """Merge runs into fewer, longer ones: neighbours join, and full strides become one run.

    Each step keeps the multiset of bytes, so later checks are exact.
    """
    while True:
        joined = _join(_absorb(runs))
        if len(joined.buffer) == len(runs.buffer):
            return joined
        runs = joined


def _absorb(runs: _Runs) -> _Runs:
    """Merge dimensions whose stride equals the run's length into the run."""
    nbytes, strides, counts = runs.nbytes.copy(), runs.strides.copy(), runs.counts.copy()
    for _ in range(strides.shape[1]):
        full = strides[:, 0] == nbytes
        nbytes[full] *= counts[full, 0]
        strides[full] = np.roll(strides[full], -1, axis=1)
        counts[full] = np.roll(counts[full], -1, axis=1)
        rows = np.flatnonzero(full)
        strides[rows, -1], counts[rows, -1] = 0, 1
    return replace(runs, nbytes=nbytes, strides=strides, counts=counts)


def _join(runs: _Runs) -> _Runs:
    """Join runs of equal dimensions that lie end to end."""
    dims = [*runs.strides.T, *runs.counts.T]
    order = np.lexsort((runs.offset, *(dim for dim in dims if dim.any() and (dim != 1).any()), runs.buffer))
    runs = take(runs, order)
    new = np.ones(len(order), np.bool_)
    new[1:] = (
        (runs.buffer[1:] != runs.buffer[:-1])
        | (runs.offset[1:] != runs.offset[:-1] + runs.nbytes[:-1])
        | (runs.strides[1:] != runs.strides[:-1]).any(axis=1)
        | (runs.counts[1:] != runs.counts[:-1]).any(axis=1)
    )
    first = np.flatnonzero(new)
    nbytes = np.add.reduceat(runs.nbytes, first) if len(first) else runs.nbytes
    return replace(take(runs, first), nbytes=nbytes)


def _expand(runs: _Runs) -> _Runs:
    """Turn every repetition into a run."""
    for dim in range(runs.counts.shape[1]):
        rows, nth = repeated(runs.counts[:, dim])
        runs = take(runs, rows)
        runs = replace(runs, offset=runs.offset + nth * runs.strides[:, dim])
    return runs


def _check_chain(engine: str, layout: Layout, runs: _Runs) -> None:
    """Check that the runs of all buffers follow each other without gap or overlap."""
    sizes = layout.live.nbytes
    base = np.cumsum(sizes) - sizes
    start = base[runs.buffer] + runs.offset
    order = np.argsort(start, kind="stable")
    start = np.append(start[order], sizes.sum())
    expected = np.concatenate([[0], start[:-1] + runs.nbytes[order]])
    broken = np.flatnonzero(start != expected)
    if not len(broken):
        return
    row = int(broken[0])
    gap = start[row] > expected[row]
    byte = int(min(start[row], expected[row]))
    number = int(np.searchsorted(np.cumsum(sizes), byte, side="right"))
    problem = "no segment writes" if gap else "several segments write"
    _refuse(engine, layout, number, f"{problem} byte {byte - int(base[number])}")


def _refuse(engine: str, layout: Layout, number: int, problem: str) -> None:
    rank, meta = layout.live.metas[number]
    raise PlanError(
        meta.name,
        f"engine {engine}, rank {rank}: {problem} of the live parameter {meta.dtype} {meta.shape}, "
        f"{meta.nbytes} bytes; segments and padding must write each byte exactly once",
    )


def _explain_unknown(engine: str, layout: Layout, row: int) -> None:
    rank = int(layout.rank[row])
    name = layout.buffer_names[int(layout.buffer[row])]
    hint = suggest(name, [meta.name for other, meta in layout.live.metas if other == rank])
    tensor = layout.tensors[int(layout.tensor[row])].name
    raise PlanError(
        name, f"engine {engine}, rank {rank}: a segment of {tensor} writes this buffer, undeclared; {hint}"
    )
