"""The segments of all ranks of one side, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.layout.column import Column
from weightsync.plan.layout.declared import Declared, Numbers
from weightsync.plan.layout.layout_table import LayoutTable, SegmentTable
from weightsync.plan.layout.numbered import Numbered
from weightsync.plan.layout.segment import (
    DTYPES,
    MOST_NBYTES,
    TOO_FAR,
    Box,
    RankLayout,
    Segment,
    TensorMeta,
    suggest,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Buffers:
    """m live parameters, and k padding regions in them, which are not written.

    Attributes:
        metas: the rank, name, dtype and local shape of each parameter.
        key: int64[m], ascending: rank * num_names + the name's number; order: int64[m], the key's position in
            `metas`.
        nbytes: int64[m]; dtype: int32[m], by `DTYPES`.
        pad_buffer, pad_offset, pad_nbytes: int64[k]; pad_buffer is a position in `metas`.
    """

    metas: tuple[tuple[int, TensorMeta], ...]
    num_names: int
    key: Int64
    order: Int64
    nbytes: Int64
    dtype: Int32
    pad_buffer: Int64
    pad_offset: Int64
    pad_nbytes: Int64

    @classmethod
    def build(
        cls,
        metas: tuple[tuple[int, TensorMeta], ...],
        padding: Sequence[tuple[int, str, int, int]],
        names: dict[str, int],
    ) -> Buffers:
        """Build columns. `padding` is (rank, buffer, byte offset, nbytes); `names` numbers buffer names.

        Raises:
            PlanError: a rank declares a buffer twice, or padding outside its declared buffers.
        """
        key = np.array([rank * len(names) + names[meta.name] for rank, meta in metas], np.int64)
        order: Int64 = np.argsort(key, kind="stable")
        twice = np.flatnonzero(np.diff(key[order]) == 0)
        if len(twice):
            rank, meta = metas[int(order[twice[0]])]
            raise PlanError(meta.name, f"rank {rank} declares this live parameter twice; name it once")
        numbers = {(rank, meta.name): number for number, (rank, meta) in enumerate(metas)} if padding else {}
        for rank, name, _, _ in padding:
            if (rank, name) not in numbers:
                hint = suggest(name, [meta.name for other, meta in metas if other == rank])
                raise PlanError(
                    name, f"rank {rank} pads it, but does not declare it as a live parameter; {hint}"
                )
        rows = [(numbers[rank, name], start, size) for rank, name, start, size in padding if size]
        for number, start, size in rows:
            meta = metas[number][1]
            if not 0 <= start < start + size <= meta.nbytes:
                problem = f"bytes {start} to {start + size} are to stay as they are, and lie outside"
                raise PlanError(meta.name, f"rank {metas[number][0]}: {problem} its {meta.nbytes} bytes")
        pads = np.array(rows, np.int64).reshape(-1, 3)
        return cls(
            metas=metas,
            num_names=len(names),
            key=key[order],
            order=order,
            nbytes=np.array([meta.nbytes for _, meta in metas], np.int64),
            dtype=np.array([DTYPES[meta.dtype] for _, meta in metas], np.int32),
            pad_buffer=pads[:, 0],
            pad_offset=pads[:, 1],
            pad_nbytes=pads[:, 2],
        )

    def find(self, rank: Int32, name: Int32) -> Int64:
        """Return the position in `metas` of each (rank, name number), -1 if undeclared."""
        key = rank.astype(np.int64) * self.num_names + name
        at = np.minimum(np.searchsorted(self.key, key), len(self.key) - 1)
        found: Int64 = np.where(self.key[at] == key, self.order[at], -1)
        return found


def columns(table: DataclassInstance) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a dataclass by name, in the order of the fields."""
    held = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: column for name, column in held.items() if isinstance(column, np.ndarray)}


def take(table: T, rows: Int64) -> T:
    """Return `rows` of a dataclass whose arrays have a row per entry."""
    return replace(table, **{name: column[rows] for name, column in columns(table).items()})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """All segments of the trainers, or of one engine, ordered by rank.

    It holds n segments of T tensors as columns. D is the largest number of dimensions, at least 1. Missing
    trailing dimensions are padded: offset 0, extent 1, stride 0, shape 1.

    Attributes:
        tensors: the T tensors, without tied aliases.
        tied: (alias, canonical) pairs; each canonical is in `tensors`.
        num_ranks: number of ranks.
        tensor, rank: int32[n], each segment's tensor and rank.
        offset, extent: int64[n, D], each segment's box, in elements.
        buffer_names: names of buffers.
        buffer: int32[n], index into `buffer_names`.
        byte_offset: int64[n], from the start of the buffer.
        strides: int64[n, D], in bytes.
        names: the T tensors' names.
        shape: int64[T, D].
        dtype: int32[T], as numbered by `DTYPES`.
        itemsize: int64[T], bytes per element.
        live: the declared live parameters and their padding.
        frozen: names of tensors that do not change after the first update.
    """

    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]
    num_ranks: int
    tensor: Int32
    rank: Int32
    offset: Int64
    extent: Int64
    buffer_names: tuple[str, ...]
    buffer: Int32
    byte_offset: Int64
    strides: Int64
    names: tuple[str, ...]
    shape: Int64
    dtype: Int32
    itemsize: Int64
    live: Buffers
    frozen: frozenset[str] = frozenset()

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankLayout]) -> Layout:
        """Join the layouts of all ranks of one side.

        Args:
            ranks: one for each rank, in order.

        Raises:
            ConfigError: a setting fits no name of any rank.
            PlanError: the ranks disagree on a tensor, two stages hold one, or a segment does not fit the
                segment's tensor or in memory.
        """
        return join_tables([LayoutTable.of(layout) for layout in ranks])

    @classmethod
    def from_columns(
        cls,
        *,
        tensors: tuple[TensorMeta, ...],
        num_ranks: int,
        tensor: Int32,
        rank: Int32,
        offset: Int64,
        extent: Int64,
        buffer: Int32 | None = None,
        buffer_names: tuple[str, ...] | None = None,
        byte_offset: Int64 | None = None,
        strides: Int64 | None = None,
        tied: tuple[tuple[str, str], ...] = (),
        buffers: tuple[tuple[int, TensorMeta], ...] = (),
        padding: tuple[tuple[int, str, int, int], ...] = (),
        frozen: frozenset[str] = frozenset(),
    ) -> Layout:
        """Make a layout from arrays, for layouts that are too large to list segment by segment.

        `offset`, `extent` and `strides` are padded as in `Layout`. By default every segment is contiguous and
        fills a buffer named after the tensor. `buffers` is (rank, live parameter), `padding` is (rank,
        buffer, byte offset, nbytes).

        Raises:
            PlanError: a box reaches out of its tensor or its buffer beyond 4 PiB, or the buffers
                contradict each other.
        """
        shape = padded((meta.shape for meta in tensors), offset.shape[1], 1)
        itemsize = np.array([meta.itemsize for meta in tensors], np.int64)
        _check_bounds(tensors, shape, tensor, offset, extent)
        if strides is None:
            inner = np.cumprod(np.maximum(extent, 1)[:, :0:-1], axis=1)[:, ::-1]
            strides = np.hstack([inner, np.ones((len(tensor), 1), np.int64)]) * itemsize[tensor, None]
        if byte_offset is None:
            byte_offset = np.zeros(len(tensor), np.int64)
        _check_reach(tensors, tensor, extent, byte_offset, strides)
        is_sorted = bool((rank[1:] >= rank[:-1]).all())  # then nothing is copied
        by_rank = slice(None) if is_sorted else np.argsort(rank, kind="stable")
        names = tuple(meta.name for meta in tensors)
        buffer_names = names if buffer_names is None else buffer_names
        known = {name: number for number, name in enumerate(buffer_names)}
        for _, meta in buffers:
            known.setdefault(meta.name, len(known))
        return cls(
            tensors=tensors,
            tied=tied,
            num_ranks=num_ranks,
            tensor=tensor.astype(np.int32)[by_rank],
            rank=rank.astype(np.int32)[by_rank],
            offset=offset[by_rank],
            extent=extent[by_rank],
            buffer_names=tuple(known),
            buffer=(tensor if buffer is None else buffer).astype(np.int32)[by_rank],
            byte_offset=byte_offset[by_rank],
            strides=strides[by_rank],
            names=names,
            shape=shape,
            dtype=np.array([DTYPES[meta.dtype] for meta in tensors], np.int32),
            itemsize=itemsize,
            live=Buffers.build(buffers, padding, known),
            frozen=frozen,
        )

    def of_tensors(self, kept: Bool) -> Layout:
        """Return the segments of some tensors. `kept`: bool[T]. Buffers keep their numbers."""
        rows, numbers = np.flatnonzero(kept[self.tensor]), np.flatnonzero(kept)
        tensors = tuple(self.tensors[number] for number in numbers.tolist())
        names = tuple(meta.name for meta in tensors)
        known = frozenset(names)
        return replace(
            self,
            tensors=tensors,
            tied=tuple(pair for pair in self.tied if pair[1] in known),
            tensor=(np.cumsum(kept) - 1)[self.tensor[rows]].astype(np.int32),
            rank=self.rank[rows],
            offset=self.offset[rows],
            extent=self.extent[rows],
            buffer=self.buffer[rows],
            byte_offset=self.byte_offset[rows],
            strides=self.strides[rows],
            names=names,
            shape=self.shape[kept],
            dtype=self.dtype[kept],
            itemsize=self.itemsize[kept],
            frozen=self.frozen & known,
        )

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """Return the segments of `rank`, in the order in which it declared them."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1])
        rows = slice(int(low), int(high))
        return tuple(
            _segment(self.tensors[tensor], self.buffer_names[buffer], offset, extent, start, strides)
            for tensor, buffer, offset, extent, start, strides in zip(
                self.tensor[rows].tolist(),
                self.buffer[rows].tolist(),
                self.offset[rows].tolist(),
                self.extent[rows].tolist(),
                self.byte_offset[rows].tolist(),
                self.strides[rows].tolist(),
                strict=True,
            )
        )


def join_tables(
    ranks: Sequence[LayoutTable],
    declared: Declared | None = None,
    numbered: Numbered | None = None,
    kept: Bool | None = None,
) -> Layout:
    """Join the layouts of all ranks of one side, in columns. Raises as `Layout.from_ranks`.

    Args:
        ranks: one for each rank, in order.
        declared, numbered: the ranks' declarations, if they are known.
        kept: bool[T], the tensors whose segments are listed; by default all. Numbers of tensors and buffers
            do not change.
    """
    declared = declared or Declared.of(ranks)
    numbered = numbered or Numbered.of(declared, ranks)
    segments = [each.held() for each in ranks] if kept is None else [*numbered.of_tensors(ranks, kept)]
    return list_segments(declared, numbered, declared.numbers, segments)


def list_segments(
    declared: Declared, numbered: Numbered, numbers: Sequence[Numbers], segments: Sequence[SegmentTable]
) -> Layout:
    """Return `segments` of all ranks as a layout. `numbers` are the ranks' numbers, as in `Declared`."""
    metas = tuple(declared.tensors.values())
    num_dims = max([1, *(len(meta.shape) for meta in metas)])
    ndim = _joined([each.ndim for each in segments])
    pairs = [*zip(numbers, segments, strict=True)]
    return Layout.from_columns(
        tensors=metas,
        num_ranks=len(segments),
        tied=declared.tied,
        tensor=_joined([numbered.tensor[its[each.tensor]] for its, each in pairs]).astype(np.int32),
        rank=np.repeat(np.arange(len(segments), dtype=np.int32), [len(each) for each in segments]),
        offset=_wide(ndim, [each.offset for each in segments], num_dims, 0),
        extent=_wide(ndim, [each.extent for each in segments], num_dims, 1),
        buffer=_joined([numbered.buffer[its[each.buffer]] for its, each in pairs]).astype(np.int32),
        buffer_names=numbered.buffer_names,
        byte_offset=_joined([each.byte_offset for each in segments]),
        strides=_wide(ndim, [each.strides for each in segments], num_dims, 0),
        buffers=declared.buffers,
        padding=declared.padding,
        frozen=declared.frozen,
    )


def _segment(
    meta: TensorMeta, buffer: str, offset: list[int], extent: list[int], start: int, strides: list[int]
) -> Segment:
    ndim = len(meta.shape)
    box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
    return Segment(meta.name, box, buffer, start, tuple(strides[:ndim]))


def padded(rows: Iterable[Sequence[int]], ndim: int, fill: int) -> Int64:
    """Return tuples of up to `ndim` numbers as rows of one array, int64[n, ndim]."""
    tails = [(fill,) * missing for missing in range(ndim + 1)]
    flat = [number for row in rows for number in (*row, *tails[ndim - len(row)])]
    return np.array(flat, np.int64).reshape(-1, ndim)


def _check_bounds(
    tensors: tuple[TensorMeta, ...], shape: Int64, tensor: Int32, offset: Int64, extent: Int64
) -> None:
    # Not offset + extent, which may overflow int64.
    bad = ((offset < 0) | (extent < 0) | (extent > shape[tensor] - offset)).any(axis=1)
    if bad.any():
        row = int(bad.argmax())
        meta = tensors[int(tensor[row])]
        ndim = len(meta.shape)
        raise PlanError(
            meta.name,
            f"box at {tuple(offset[row, :ndim].tolist())} of extent {tuple(extent[row, :ndim].tolist())} "
            f"reaches out of the shape {meta.shape}; offsets and extents count global elements",
        )


def _check_reach(
    tensors: tuple[TensorMeta, ...], tensor: Int32, extent: Int64, byte_offset: Int64, strides: Int64
) -> None:
    """Check that segments stay within 4 PiB, so that sums are exact."""
    steps = _largest(extent) * _largest(strides) * extent.shape[1]
    if steps + _largest(byte_offset) <= MOST_NBYTES:
        return
    itemsize = np.array([meta.itemsize for meta in tensors], np.int64)[tensor]
    last = (np.maximum(extent - 1, 0) * np.abs(strides.astype(float))).sum(axis=1)
    reach = np.abs(byte_offset.astype(float)) + last + itemsize
    if (reach > MOST_NBYTES).any():
        row = int(reach.argmax())
        shown = f"byte offset {int(byte_offset[row])}, strides {tuple(strides[row].tolist())}"
        raise PlanError(tensors[int(tensor[row])].name, f"{shown} {TOO_FAR}")


def _largest(values: Int64) -> int:
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def _joined(columns: Sequence[Column]) -> Int64:
    return np.concatenate([np.empty(0, np.int64), *columns])


def _wide(ndim: Int64, columns: Sequence[Column], num_dims: int, fill: int) -> Int64:
    """Join columns of all ranks that have `ndim` numbers for each segment, padded to `num_dims`."""
    wide = np.full((len(ndim), num_dims), fill, np.int64)
    wide[np.arange(num_dims) < ndim[:, None]] = _joined(columns)
    return wide
