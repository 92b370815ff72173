"""A rank's layout in columns, as processes send it."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np

from weightsync.errors import PlanError
from weightsync.plan.layout.arrangement import Arrangement
from weightsync.plan.layout.column import Column, Positions, column, ranges
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.mesh_segments import MeshSegments
from weightsync.plan.layout.segment import (
    DTYPES,
    MOST_NBYTES,
    TOO_FAR,
    Box,
    RankLayout,
    Segment,
    Stage,
    TensorMeta,
)

_DTYPES = tuple(DTYPES)


def pack_names(names: Iterable[str]) -> bytes:
    """Return names as one value. Equal names give equal bytes."""
    return zlib.compress(json.dumps([*names]).encode(), 1)


def unpack_names(packed: bytes) -> list[str]:
    """Return the names of `pack_names`."""
    names: list[str] = json.loads(zlib.decompress(packed))
    return names


@dataclass(frozen=True, slots=True, eq=False)
class MetaTable:
    """n tensors, or live parameters.

    Attributes:
        name: [n], the number of each name.
        dtype: [n], by `DTYPES`.
        ndim: [n], the number of dimensions.
        shape: [sum of ndim], one shape after the other.
    """

    name: Column
    dtype: Column
    ndim: Column
    shape: Column

    @classmethod
    def of(cls, metas: Sequence[TensorMeta], numbers: Mapping[str, int]) -> MetaTable:
        """Make columns. `numbers` has a number for each name."""
        return cls(
            column(numbers[meta.name] for meta in metas),
            column(DTYPES[meta.dtype] for meta in metas),
            column(len(meta.shape) for meta in metas),
            column(dim for meta in metas for dim in meta.shape),
        )

    def __len__(self) -> int:
        return len(self.name)

    def metas(self, names: Sequence[str]) -> tuple[TensorMeta, ...]:
        """Return the tensors. `names` has the name of each number."""
        shapes = _rows(self.ndim, self.shape)
        return tuple(
            TensorMeta(names[name], _DTYPES[dtype], shape)
            for name, dtype, shape in zip(self.name.tolist(), self.dtype.tolist(), shapes, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """n segments.

    Attributes:
        tensor, buffer: [n], the numbers of the names.
        byte_offset: [n].
        ndim: [n], the number of dimensions.
        offset, extent, strides: [sum of ndim], one segment after the other.
    """

    tensor: Column
    buffer: Column
    byte_offset: Column
    ndim: Column
    offset: Column
    extent: Column
    strides: Column

    @classmethod
    def of(cls, segments: Sequence[Segment], numbers: Mapping[str, int]) -> SegmentTable:
        """Make columns. `numbers` has a number for each name.

        Raises OverflowError for a number that int64 does not hold.
        """
        return cls(
            column(numbers[each.tensor] for each in segments),
            column(numbers[each.buffer] for each in segments),
            column(each.byte_offset for each in segments),
            column(len(each.strides) for each in segments),
            column(number for each in segments for number in each.box.offset),
            column(number for each in segments for number in each.box.extent),
            column(number for each in segments for number in each.strides),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Positions) -> SegmentTable:
        """Return the segments at `rows`, int[m]."""
        ndim = self.ndim.astype(np.int64)
        dims = ranges((np.cumsum(ndim) - ndim)[rows], ndim[rows])
        parts = {name: getattr(self, name)[rows] for name in ("tensor", "buffer", "byte_offset", "ndim")}
        return SegmentTable(**parts, **{n: getattr(self, n)[dims] for n in ("offset", "extent", "strides")})

    def segments(self, names: Sequence[str]) -> tuple[Segment, ...]:
        """Return the segments. `names` has the name of each number."""
        rows = zip(
            self.tensor.tolist(),
            _rows(self.ndim, self.offset),
            _rows(self.ndim, self.extent),
            self.buffer.tolist(),
            self.byte_offset.tolist(),
            _rows(self.ndim, self.strides),
            strict=True,
        )
        return tuple(
            Segment(names[tensor], Box(offset, extent), names[buffer], start, strides)
            for tensor, offset, extent, buffer, start, strides in rows
        )


@dataclass(frozen=True, slots=True)
class Outline:
    """The differences between ranks whose layouts are otherwise equal.

    Attributes:
        key: 16 bytes, equal only for these ranks; empty if that is known.
        device, draft: as in the layout.
        mesh: the rank's coordinates, if its segments follow from them.
    """

    key: bytes
    device: str
    mesh: tuple[int, ...]
    draft: Draft | None


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTable:
    """A `RankLayout` in columns. Pickling it makes no objects per tensor.

    Attributes:
        names: all used names without repeats, as of `pack_names`. Columns have the names' numbers.
        tensors, buffers: the layout's tensors and buffers.
        listed, stated: the segments, listed, or stated for all ranks of a mesh. One of the two is None.
        mesh: the rank's coordinates if they are stated.
        tied: [k, 2], names of (alias, canonical).
        padding: [k, 3], (name of the buffer, byte offset, nbytes).
        frozen: [k], names.
        device, stage, converts, draft, arrangement: as in the layout.
        stored_names, stored: the names of the layout's stored tensors, as of `pack_names`, and the tensors.
    """

    names: bytes
    tensors: MetaTable
    listed: SegmentTable | None
    stated: MeshSegments | None
    tied: Column
    buffers: MetaTable
    padding: Column
    frozen: Column
    device: str
    stage: Stage | None
    converts: str
    stored_names: bytes
    stored: MetaTable
    draft: Draft | None = None
    mesh: tuple[int, ...] = ()
    arrangement: Arrangement | None = None

    @classmethod
    def of(cls, layout: RankLayout | LayoutTable) -> LayoutTable:
        """Make columns of a layout. Returns a `LayoutTable` unchanged.

        Raises:
            PlanError: the offset, extent and strides of a segment have different lengths, or one of these
                numbers is too large.
        """
        if isinstance(layout, LayoutTable):
            return layout
        for segment in layout.segments:
            check_lengths(segment, layout.tensors)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(_names(layout)))}
        try:
            segments = SegmentTable.of(layout.segments, numbers)
            stated = _stated(layout, segments)
            return cls(
                pack_names(numbers),
                MetaTable.of(layout.tensors, numbers),
                None if stated else segments,
                stated,
                column(numbers[name] for pair in layout.tied for name in pair).reshape(-1, 2),
                MetaTable.of(layout.buffers, numbers),
                column(n for row in layout.padding for n in _padding(row, numbers)).reshape(-1, 3),
                column(numbers[name] for name in layout.frozen),
                layout.device,
                layout.stage,
                layout.converts,
                pack_names(meta.name for meta in layout.stored),
                MetaTable.of(layout.stored, {meta.name: i for i, meta in enumerate(layout.stored)}),
                layout.draft,
                layout.mesh.coordinates if layout.mesh and stated else (),
                layout.arrangement,
            )
        except OverflowError:
            raise _too_large(layout) from None

    @property
    def segments(self) -> SegmentTable | MeshSegments:
        """The segments, listed or stated."""
        segments = self.listed if self.stated is None else self.stated
        assert segments is not None
        return segments

    def held(self) -> SegmentTable:
        """Return the rank's segments."""
        segments = self.segments
        return segments if isinstance(segments, SegmentTable) else SegmentTable(**segments.at(self.mesh))

    def outline(self) -> Outline:
        """Return the outline from which `of_rank` makes this table, given an otherwise equal table."""
        state = hashlib.sha256()
        for field in fields(self):
            if field.name not in ("device", "draft", "mesh"):
                value = getattr(self, field.name)
                parts = (
                    content(value)
                    if isinstance(value, (MetaTable, SegmentTable, MeshSegments, np.ndarray))
                    else ((field.name, repr(value).encode()),)
                )
                for kind, data in parts:
                    state.update(f"{kind} {len(data)} ".encode())
                    state.update(data)
        return self.own(state.digest()[:16])

    def own(self, key: bytes = b"") -> Outline:
        """Return the rank's own parts of this layout, as an outline with `key`."""
        return Outline(key, self.device, self.mesh, self.draft)

    def of_all(self) -> tuple[object, ...]:
        """Return the parts that this layout shares with the results of `of_rank`, as objects."""
        own = {field.name for field in fields(Outline)}
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in own)

    def of_rank(self, outline: Outline) -> LayoutTable:
        """Return the layout of another rank, whose outline has the same key."""
        return replace(self, device=outline.device, mesh=outline.mesh, draft=outline.draft)

    def rank_layout(self) -> RankLayout:
        """Return the layout."""
        names = unpack_names(self.names)
        return RankLayout(
            self.tensors.metas(names),
            self.held().segments(names),
            self.tied_names(names),
            self.buffers.metas(names),
            self.padded(names),
            self.device,
            self.stage,
            self.frozen_names(names),
            self.converts,
            self.stored.metas(unpack_names(self.stored_names)),
            self.draft,
            self.arrangement,
        )

    def tied_names(self, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return (alias, canonical) pairs. `names` come from `unpack_names`."""
        return tuple((names[alias], names[canonical]) for alias, canonical in self.tied.tolist())

    def padded(self, names: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
        """Return (buffer, byte offset, nbytes) of each padding. `names` come from `unpack_names`."""
        return tuple((names[name], start, nbytes) for name, start, nbytes in self.padding.tolist())

    def frozen_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return names of the frozen tensors. `names` come from `unpack_names`."""
        return tuple(names[name] for name in self.frozen.tolist())

    def takes_stored(self, names: Collection[str]) -> bool:
        """Return True if `names` of arriving tensors are the stored tensors' names, see `RankLayout`."""
        if not len(self.stored):
            return False
        full = set(unpack_names(self.names))
        return any(name in names for name in unpack_names(self.stored_names) if name not in full)

    def for_tensors(self, names: Collection[str]) -> LayoutTable:
        """Return the layout with which the rank takes tensors of these names, as `RankLayout.for_tensors`."""
        return self.as_stored() if self.takes_stored(names) else self

    def as_stored(self) -> LayoutTable:
        """Return the layout of the stored tensors."""
        return LayoutTable.of(self.rank_layout().as_stored())

    def alike(self, other: LayoutTable) -> bool:
        """Return True if both layouts are equal, devices, conversions, stored tensors and drafts aside."""
        parts = ("tensors", "tied", "buffers", "padding", "frozen")
        return (
            self.stage == other.stage
            and content(self.held()) == content(other.held())
            and all(content(getattr(self, part)) == content(getattr(other, part)) for part in parts)
            # Another version of zlib may compress equal names differently.
            and (self.names == other.names or unpack_names(self.names) == unpack_names(other.names))
        )

    def memory_content(self) -> Iterator[bytes]:
        """Yield bytes that are equal for equal layouts, and differ where segments, buffers or padding do."""
        yield zlib.decompress(self.names)
        for part in (self.held(), self.buffers, self.padding):
            for kind, data in content(part):
                yield f"{kind} {len(data)} ".encode()
                yield data


_Table: TypeAlias = MetaTable | SegmentTable | MeshSegments | Column


def content(part: _Table) -> tuple[tuple[str, bytes], ...]:
    """Return the columns of a part as values that are equal if the columns are, and can be hashed."""
    held = [part] if isinstance(part, np.ndarray) else [getattr(part, field.name) for field in fields(part)]
    return tuple(
        (each.dtype.str, each.tobytes()) if isinstance(each, np.ndarray) else ("", repr(each).encode())
        for each in held
    )


def _stated(layout: RankLayout, segments: SegmentTable) -> MeshSegments | None:
    """Return the segments as they follow from the layout's mesh, if they do."""
    if not layout.mesh:
        return None
    place = layout.mesh
    stated = MeshSegments.of(layout.segments, layout.tensors, place, segments.tensor, segments.buffer)
    if stated and content(SegmentTable(**stated.at(place.coordinates))) == content(segments):
        return stated
    return None


def check_lengths(segment: Segment, tensors: Iterable[TensorMeta], ndim: int | None = None) -> None:
    """Check that the offset, extent and strides of a segment have `ndim` numbers; by default equally many.

    `tensors` has the segment's tensor, if it is known. Raises PlanError.
    """
    lengths = {len(segment.box.offset), len(segment.box.extent), len(segment.strides)}
    if len(lengths) == 1 and ndim in (None, *lengths):
        return
    shape = next((meta.shape for meta in tensors if meta.name == segment.tensor), None)
    wanted = "as many numbers as its tensor has dimensions"
    raise PlanError(
        segment.tensor,
        f"offset {segment.box.offset}, extent {segment.box.extent}, strides {segment.strides}: "
        f"each needs {wanted if shape is None else f'{len(shape)} numbers, for shape {shape}'}",
    )


def _names(layout: RankLayout) -> Iterator[str]:
    yield from (meta.name for meta in layout.tensors)
    yield from (segment.tensor for segment in layout.segments)
    yield from (segment.buffer for segment in layout.segments)
    yield from itertools.chain.from_iterable(layout.tied)
    yield from (meta.name for meta in layout.buffers)
    yield from (name for name, _, _ in layout.padding)
    yield from layout.frozen


def _padding(row: tuple[str, int, int], numbers: Mapping[str, int]) -> tuple[int, int, int]:
    """Return a row of padding. Numbers are cut to int64, which is still outside of any buffer."""
    name, start, nbytes = row
    limit = np.iinfo(np.int64)
    return numbers[name], min(max(start, limit.min), limit.max), min(max(nbytes, limit.min), limit.max)


def _rows(sizes: Column, flat: Column) -> Iterator[tuple[int, ...]]:
    """Cut `flat` into tuples of `sizes`."""
    numbers, end = flat.tolist(), 0
    for size in sizes.tolist():
        end += size
        yield tuple(numbers[end - size : end])


def _too_large(layout: RankLayout) -> PlanError:
    for segment in layout.segments:
        box = segment.box
        numbers = (*box.offset, *box.extent, *segment.strides, segment.byte_offset)
        if any(abs(number) > MOST_NBYTES for number in numbers):
            return PlanError(segment.tensor, f"{segment} {TOO_FAR}")
    raise AssertionError("no segment has a number that int64 does not hold")
