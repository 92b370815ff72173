"""Builds a layout from cuts per kind of tensor and positions of ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError
from weightsync.plan import Layout, TensorMeta
from weightsync.plan.layout.layout import Int64

_NAME = re.compile(
    r"(?P<home>(?:draft/)?(?:model\.layers\.(?P<layer>\d+)\.)?(?:\w+\.)*?)"
    r"(?:experts\.(?P<expert>\d+)\.)?(?P<leaf>\w+)\.(?P<what>\w+)"
)
BEHIND = 1 << 30
"""Layer number of tensors that come after all layers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Kind:
    """Tensors that differ only in layer and expert.

    Attributes:
        leaf, what: the last two parts of the names, such as ``q_proj`` and ``weight``.
        is_expert: each tensor belongs to one expert.
        meta: shape and dtype, of the first tensor.
        rows: int64[k], positions in the list of tensors, ascending.
        layer, expert: int64[k]. Tensors before the layers have layer 0, those after them `BEHIND`.
        homes: k name prefixes, up to the module, without ``experts.N.``.
    """

    leaf: str
    what: str
    is_expert: bool
    meta: TensorMeta
    rows: Int64
    layer: Int64
    expert: Int64
    homes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How ranks cut one kind of tensor, and where the parts are.

    Attributes:
        parts: number of equal parts along `axis`. With more ranks than parts, neighbouring ranks
            take the same one.
        size: length of a part; the last ones may be shorter or empty. 0 divides exactly.
        blocks: number of pieces of a part, `pitch` rows apart in the buffer.
        buffer: the parameter of the module that contains the tensor; empty for a parameter by itself.
        start: rows of the buffer before it.
        depth: rows of the buffer per expert, if the experts of a rank are stacked in one parameter.
        live: the buffer's local shape, without the stack's dimension, on the one kind that declares it.
    """

    axis: int = 0
    parts: int = 1
    size: int = 0
    blocks: int = 1
    pitch: int = 0
    buffer: str = ""
    start: int = 0
    depth: int = 0
    live: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The part of each tensor that one rank takes.

    The rank takes place `dense[0]` of `dense[1]`, and of experts place `sparse[0]` of `sparse[1]`.
    `layers` and `experts` limit the part to a range, without the end.
    """

    rank: int
    dense: tuple[int, int]
    sparse: tuple[int, int]
    layers: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None


def partition(count: int, parts: int) -> list[tuple[int, int]]:
    """Split `count` items into `parts` ranges (first, end). The first ranges may be longer by one."""
    each, rest = divmod(count, parts)
    bounds = [each * part + min(part, rest) for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def lay_out(
    tensors: Sequence[TensorMeta],
    cut: Callable[[Kind], Cut],
    positions: Sequence[RankPosition],
    tied: tuple[tuple[str, str], ...],
) -> Layout:
    """Return the layout of the ranks at `positions`."""
    columns = _Columns()
    for kind in _kinds(tensors):
        how = cut(kind)
        place = _Place(kind, how, columns)
        for position in positions:
            place.add(position)
    return columns.layout(tuple(tensors), len(positions), tied)


def _kinds(tensors: Sequence[TensorMeta]) -> Iterator[Kind]:
    groups: dict[tuple[object, ...], list[tuple[int, re.Match[str]]]] = {}
    for number, meta in enumerate(tensors):
        match = _NAME.fullmatch(meta.name)
        if match is None:
            raise ConfigError("tensors", meta.name, "give names such as model.layers.0.mlp.up_proj.weight")
        key = (match["leaf"], match["what"], match["expert"] is None, meta.shape, meta.dtype)
        groups.setdefault(key, []).append((number, match))
    for group in groups.values():
        number, match = group[0]
        outside = BEHIND if match["leaf"] in ("norm", "lm_head") else 0
        yield Kind(
            leaf=match["leaf"],
            what=match["what"],
            is_expert=match["expert"] is not None,
            meta=tensors[number],
            rows=np.array([number for number, _ in group], np.int64),
            layer=np.array([int(m["layer"] or outside) for _, m in group], np.int64),
            expert=np.array([int(m["expert"] or 0) for _, m in group], np.int64),
            homes=tuple(m["home"] for _, m in group),
        )


@dataclass(slots=True)
class _Columns:
    """Collects the arguments of `Layout.from_columns`.

    Attributes:
        parts: columns of some segments: tensor, rank, offset, extent, buffer, byte offset.
    """

    parts: list[tuple[Int64, ...]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    live: list[tuple[int, TensorMeta]] = field(default_factory=list)
    padding: list[tuple[int, str, int, int]] = field(default_factory=list)

    def layout(
        self, tensors: tuple[TensorMeta, ...], num_ranks: int, tied: tuple[tuple[str, str], ...]
    ) -> Layout:
        tensor, rank, offset, extent, buffer, start = map(np.concatenate, zip(*self.parts, strict=True))
        # Sort the parts of a fused parameter together, as engines receive them in this order.
        order = np.lexsort((tensor, rank))
        return Layout.from_columns(
            tensors=tensors,
            num_ranks=num_ranks,
            tensor=tensor[order].astype(np.int32),
            rank=rank[order].astype(np.int32),
            offset=offset[order],
            extent=extent[order],
            buffer=buffer[order].astype(np.int32),
            buffer_names=tuple(self.names),
            byte_offset=start[order],
            tied=tied,
            buffers=tuple(self.live),
            padding=tuple(self.padding),
        )


class _Place:
    """Adds one kind of tensor with a cut to the columns of each rank."""

    def __init__(self, kind: Kind, cut: Cut, columns: _Columns) -> None:
        self._kind, self._cut, self._columns = kind, cut, columns
        self._names = [
            self._buffer(home, expert) for home, expert in zip(kind.homes, kind.expert.tolist(), strict=True)
        ]
        known = columns.names
        self._numbers = np.array([known.setdefault(name, len(known)) for name in self._names], np.int64)

    def _buffer(self, home: str, expert: int) -> str:
        kind, cut = self._kind, self._cut
        if cut.depth:
            return f"{home}experts.{cut.buffer}_{kind.what}"
        inside = f"experts.{expert}." if kind.is_expert else ""
        return f"{home}{inside}{cut.buffer or kind.leaf}.{kind.what}"

    def add(self, position: RankPosition) -> None:
        kind, cut, columns = self._kind, self._cut, self._columns
        taken = np.flatnonzero(self._taken(position))
        place, places = position.sparse if kind.is_expert else position.dense
        offset, extent, full = self._box(place * cut.parts // places)
        width = extent[1] * kind.meta.itemsize
        first = position.experts[0] if position.experts else 0
        base = (cut.start + cut.depth * (kind.expert[taken] - first)) * width
        if len(taken) and cut.live is not None:
            self._declare(position, taken, (full - extent[0]) * width)
        if not all(extent):
            return
        rows = extent[0] // cut.blocks
        for block in range(cut.blocks):
            rank = np.full(len(taken), position.rank)
            low = np.tile((offset[0] + block * rows, offset[1]), (len(taken), 1))
            size = np.tile((rows, extent[1]), (len(taken), 1))
            start = base + block * cut.pitch * width
            columns.parts.append((kind.rows[taken], rank, low, size, self._numbers[taken], start))

    def _taken(self, position: RankPosition) -> npt.NDArray[np.bool_]:
        kind = self._kind
        taken = np.ones(len(kind.rows), np.bool_)
        if position.layers is not None:
            taken &= (kind.layer >= position.layers[0]) & (kind.layer < position.layers[1])
        if kind.is_expert and position.experts is not None:
            taken &= (kind.expert >= position.experts[0]) & (kind.expert < position.experts[1])
        return taken

    def _box(self, part: int) -> tuple[list[int], list[int], int]:
        """Return offset and extent of a part in two dimensions, and the rows of a full part."""
        cut, shape = self._cut, [*self._kind.meta.shape, 1][:2]
        size = cut.size or shape[cut.axis] // cut.parts
        offset, extent = [0, 0], list(shape)
        offset[cut.axis] = min(part * size, shape[cut.axis])
        extent[cut.axis] = min(size, shape[cut.axis] - offset[cut.axis])
        return offset, extent, size if cut.axis == 0 else shape[0]

    def _declare(self, position: RankPosition, taken: Int64, missing: int) -> None:
        kind, cut, columns = self._kind, self._cut, self._columns
        assert cut.live is not None
        first, last = position.experts or (0, int(kind.expert.max()) + 1)
        shape = (last - first, *cut.live) if cut.depth else cut.live
        for name in dict.fromkeys(self._names[row] for row in taken.tolist()):
            meta = TensorMeta(name, kind.meta.dtype, shape)
            columns.live.append((position.rank, meta))
            if missing:
                columns.padding.append((position.rank, name, meta.nbytes - missing, missing))
