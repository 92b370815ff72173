"""Proof that an engine's live parameters are written exactly once, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weightsync.errors import PlanError
from weightsync.plan.buffers import DTYPES, Int64
from weightsync.plan.layout import Layout
from weightsync.plan.tensors import suggest

__all__ = ["check_live"]


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
    """Segments and padding must write each byte of each declared buffer exactly once.

    Ranks that declare no buffers are not checked.

    Raises:
        PlanError: names the buffer, the rank and the first byte at fault.
    """
    if not layout.live.metas:
        return
    pairs = zip(_columns(_segment_runs(engine, layout)), _columns(_padding_runs(layout)), strict=True)
    runs = _Runs(*(np.concatenate(pair) for pair in pairs))
    last = runs.offset + ((runs.counts - 1) * runs.strides).sum(axis=1) + runs.nbytes
    out = (runs.offset < 0) | (last > layout.live.nbytes[runs.buffer])
    if out.any():
        row = int(out.argmax())
        problem = f"bytes {int(runs.offset[row])} to {int(last[row])} lie outside"
        _refuse(engine, layout, int(runs.buffer[row]), problem)
    _check_chain(engine, layout, _expand(_collapse(runs)))


def _columns(runs: _Runs) -> tuple[Int64, ...]:
    return runs.buffer, runs.offset, runs.nbytes, runs.strides, runs.counts


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
    """Bytes are copied, not cast: a parameter has its tensors' dtype, or is raw bytes."""
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
        live.pad_buffer,
        live.pad_offset,
        live.pad_nbytes,
        np.zeros(shape, np.int64),
        np.ones(shape, np.int64),
    )


def _collapse(runs: _Runs) -> _Runs:
    """The same bytes in fewer, longer runs: neighbours join, full strides become one run.

    Each rewriting keeps the multiset of bytes, so what is found out later is exact.
    """
    while True:
        joined = _join(_absorb(runs))
        if len(joined.buffer) == len(runs.buffer):
            return joined
        runs = joined


def _absorb(runs: _Runs) -> _Runs:
    """Dimensions whose stride equals the run's length become part of the run."""
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
    """Runs of equal dimensions that lie end to end become one."""
    dims = [*runs.strides.T, *runs.counts.T]
    order = np.lexsort((runs.offset, *(dim for dim in dims if dim.any() and (dim != 1).any()), runs.buffer))
    runs = _Runs(*(column[order] for column in _columns(runs)))
    new = np.ones(len(order), np.bool_)
    new[1:] = (
        (runs.buffer[1:] != runs.buffer[:-1])
        | (runs.offset[1:] != runs.offset[:-1] + runs.nbytes[:-1])
        | (runs.strides[1:] != runs.strides[:-1]).any(axis=1)
        | (runs.counts[1:] != runs.counts[:-1]).any(axis=1)
    )
    first = np.flatnonzero(new)
    nbytes = np.add.reduceat(runs.nbytes, first) if len(first) else runs.nbytes
    return _Runs(runs.buffer[first], runs.offset[first], nbytes, runs.strides[first], runs.counts[first])


def _expand(runs: _Runs) -> _Runs:
    """Every repetition as a run of its own."""
    buffer, offset, nbytes, counts = runs.buffer, runs.offset, runs.nbytes, runs.counts
    strides = runs.strides
    for dim in range(counts.shape[1]):
        times = counts[:, dim]
        rows = np.repeat(np.arange(len(times)), times)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
        buffer, nbytes, counts = buffer[rows], nbytes[rows], counts[rows]
        offset = offset[rows] + nth * strides[rows, dim]
        strides = strides[rows]
    return _Runs(buffer, offset, nbytes, strides, counts)


def _check_chain(engine: str, layout: Layout, runs: _Runs) -> None:
    """Sorted by address, the runs of all buffers must follow each other without a gap."""
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
