"""The segments of all ranks of one side, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.segment import ITEMSIZE, MOST_NBYTES, Box, RankLayout, Segment, TensorMeta, suggest
from weightsync.plan.stages import check_stages

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

DTYPES = {name: code for code, name in enumerate(ITEMSIZE)}
"""A number for each dtype, for columns."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Buffers:
    """m live parameters, and k padding regions in them, which are not written.

    Attributes:
        metas: rank, and name, dtype and local shape.
        key: int64[m], ascending: rank * num_names + the name's number; order: int64[m], its
            position in `metas`.
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
    """Return the arrays of a dataclass by name, in the order of its fields."""
    held = {field.name: getattr(table, field.name) for field in fields(table)}
    return {name: column for name, column in held.items() if isinstance(column, np.ndarray)}


def take(table: T, rows: Int64) -> T:
    """Return `rows` of a dataclass whose arrays have a row for each of its entries."""
    return replace(table, **{name: column[rows] for name, column in columns(table).items()})


_FAR = f"reaches beyond {MOST_NBYTES} bytes (4 PiB); offsets and strides count bytes, boxes count elements"


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
            PlanError: the ranks disagree on a tensor, two stages hold one, or a segment does not fit its
                tensor or in memory.
        """
        tied = _join_tied(ranks)
        metas = _join_tensors(ranks, dict(tied))
        check_stages(ranks)
        index = {name: number for number, name in enumerate(metas)}
        segments = [segment for layout in ranks for segment in layout.segments]
        for segment in segments:
            _check_segment(segment, metas, dict(tied) if segment.tensor not in metas else {})
        try:
            return cls._join(ranks, metas, index, tied, segments)
        except OverflowError:  # NumPy's, for a number that int64 does not hold
            raise _too_large(segments) from None

    @classmethod
    def _join(
        cls,
        ranks: Sequence[RankLayout],
        metas: Mapping[str, TensorMeta],
        index: Mapping[str, int],
        tied: tuple[tuple[str, str], ...],
        segments: Sequence[Segment],
    ) -> Layout:
        buffers: dict[str, int] = {}
        ndim = max([1, *(len(meta.shape) for meta in metas.values())])
        counts = [len(layout.segments) for layout in ranks]
        return cls.from_columns(
            tensors=tuple(metas.values()),
            num_ranks=len(ranks),
            tied=tied,
            tensor=np.array([index[s.tensor] for s in segments], np.int32),
            rank=np.repeat(np.arange(len(ranks), dtype=np.int32), counts),
            offset=padded((s.box.offset for s in segments), ndim, 0),
            extent=padded((s.box.extent for s in segments), ndim, 1),
            buffer=np.array([buffers.setdefault(s.buffer, len(buffers)) for s in segments], np.int32),
            buffer_names=tuple(buffers),
            byte_offset=np.array([s.byte_offset for s in segments], np.int64),
            strides=padded((s.strides for s in segments), ndim, 0),
            buffers=tuple((rank, meta) for rank, layout in enumerate(ranks) for meta in layout.buffers),
            padding=tuple((rank, *entry) for rank, layout in enumerate(ranks) for entry in layout.padding),
            frozen=_join_frozen(ranks),
        )

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

        `offset`, `extent` and `strides` are padded as in `Layout`. By default each segment is
        contiguous and fills a buffer named after its tensor. `buffers` is (rank, live parameter),
        `padding` is (rank, buffer, byte offset, nbytes).

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
        by_rank = np.argsort(rank, kind="stable")
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


def _join_tied(ranks: Sequence[RankLayout]) -> tuple[tuple[str, str], ...]:
    joined: dict[str, str] = {}
    for alias, canonical in (pair for layout in ranks for pair in layout.tied):
        if joined.setdefault(alias, canonical) != canonical:
            raise PlanError(alias, f"tied to {joined[alias]} and to {canonical}; ranks must agree on one")
    for alias, canonical in joined.items():
        if canonical in joined:
            raise PlanError(alias, f"tied to {canonical}, itself an alias; tie to {joined[canonical]}")
    return tuple(sorted(joined.items()))


def _join_frozen(ranks: Sequence[RankLayout]) -> frozenset[str]:
    joined = frozenset(name for layout in ranks for name in layout.frozen)
    for rank, layout in enumerate(ranks) if joined else ():
        for meta in layout.tensors:
            if meta.name in joined and meta.name not in layout.frozen:
                raise PlanError(
                    meta.name, f"frozen, but not on rank {rank}; give every rank the same frozen patterns"
                )
    return joined


def _join_tensors(ranks: Sequence[RankLayout], tied: dict[str, str]) -> dict[str, TensorMeta]:
    """Return all ranks' tensors by name, in order of first appearance, without aliases."""
    metas: dict[str, TensorMeta] = {}
    owner: dict[str, int] = {}
    for rank, layout in enumerate(ranks):
        for meta in layout.tensors:
            known = metas.setdefault(meta.name, meta)
            if known is meta:
                owner[meta.name] = rank
            elif known != meta:
                raise PlanError(
                    meta.name,
                    f"rank {owner[meta.name]} says {known.dtype} {known.shape}, "
                    f"rank {rank} says {meta.dtype} {meta.shape}; all must declare the global tensor",
                )
    for alias, canonical in tied.items():
        if canonical not in metas:
            raise PlanError(
                alias, f"tied to {canonical}, which no rank declares; {suggest(canonical, metas)}"
            )
        meta = metas.pop(alias, metas[canonical])
        if meta.shape != metas[canonical].shape:
            raise PlanError(
                alias, f"shape {meta.shape}, but tied to {canonical} of shape {metas[canonical].shape}"
            )
    return metas


def _check_segment(segment: Segment, metas: dict[str, TensorMeta], tied: dict[str, str]) -> None:
    name, box = segment.tensor, segment.box
    if name in tied:
        raise PlanError(name, f"tied to {tied[name]}, so it has no segments; give them to {tied[name]}")
    if name not in metas:
        raise PlanError(name, f"a segment names it, no rank declares it; {suggest(name, metas)}")
    ndim = len(metas[name].shape)
    if {len(box.offset), len(box.extent), len(segment.strides)} != {ndim}:
        raise PlanError(
            name,
            f"offset {box.offset}, extent {box.extent}, strides {segment.strides}: "
            f"each needs {ndim} numbers, for shape {metas[name].shape}",
        )


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
        raise PlanError(tensors[int(tensor[row])].name, f"{shown} {_FAR}")


def _largest(values: Int64) -> int:
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def _too_large(segments: Sequence[Segment]) -> PlanError:
    for segment in segments:
        box = segment.box
        numbers = (*box.offset, *box.extent, *segment.strides, segment.byte_offset)
        if any(abs(number) > MOST_NBYTES for number in numbers):
            return PlanError(segment.tensor, f"{segment} {_FAR}")
    raise AssertionError("no segment has a number that int64 does not hold")
