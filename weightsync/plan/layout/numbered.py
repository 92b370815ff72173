"""Numbers of the tensors and buffers that the segments of one side are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.layout.column import Positions
from weightsync.plan.layout.declared import Declared, Numbers
from weightsync.plan.layout.layout_table import LayoutTable, SegmentTable, check_lengths
from weightsync.plan.layout.mesh_segments import MeshSegments
from weightsync.plan.layout.segment import suggest

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Segments that one or more ranks state, the first such rank, and its `Declared.numbers`."""

    rank: int
    numbers: Numbers
    segments: SegmentTable | MeshSegments


@dataclass(frozen=True, slots=True, eq=False)
class Numbered:
    """Tensors and buffers by the number of the name in `Declared.names`.

    Attributes:
        tensor: int64[names], the number in `Declared.tensors` of the tensor of that name; else -1.
        buffer: int64[names], the buffer of that name, an index into `buffer_names`.
        buffer_names: names of the buffers, in order of first appearance.
        distinct: the segments of all ranks, without repeated objects.
    """

    tensor: Positions
    buffer: Positions
    buffer_names: tuple[str, ...]
    distinct: Sequence[Distinct]

    @classmethod
    def of(cls, declared: Declared, ranks: Sequence[LayoutTable]) -> Numbered:
        """Number the declarations of `ranks`, the layouts of one side.

        Raises PlanError if a segment has no tensor, or not as many dimensions as the tensor.
        """
        index = {name: number for number, name in enumerate(declared.tensors)}
        tensor = np.array([index.get(name, -1) for name in declared.names], np.int64)
        distinct = _distinct(declared, ranks)
        ndim = np.array([len(meta.shape) for meta in declared.tensors.values()], np.int64)
        for each in distinct:
            _check(declared, tensor, ndim, each, ranks[each.rank])
        buffers = [each.numbers[each.segments.buffer] for each in distinct]
        used, buffer = _by_appearance(np.concatenate([np.empty(0, np.int64), *buffers]), len(declared.names))
        return cls(tensor, buffer, tuple(declared.names[number] for number in used.tolist()), distinct)

    def of_tensors(self, ranks: Sequence[LayoutTable], kept: Bool) -> Iterator[SegmentTable]:
        """Yield the segments of each rank, of the tensors that are `kept`: bool[T]."""
        part = {}
        for each in self.distinct:
            rows = np.flatnonzero(kept[self.tensor[each.numbers[each.segments.tensor]]])
            part[id(each.segments)] = each.segments.take(rows)
        for rank in ranks:
            segments = part[id(rank.segments)]
            yield segments if isinstance(segments, SegmentTable) else SegmentTable(**segments.at(rank.mesh))


def _distinct(declared: Declared, ranks: Sequence[LayoutTable]) -> Sequence[Distinct]:
    found: dict[int, Distinct] = {}
    for rank, (numbers, each) in enumerate(zip(declared.numbers, ranks, strict=True)):
        found.setdefault(id(each.segments), Distinct(rank, numbers, each.segments))
    return [*found.values()]


def _by_appearance(numbers: Positions, size: int) -> tuple[Positions, Positions]:
    """Return the numbers that occur, in order of first appearance, and the place of each number in them."""
    first = np.full(size, len(numbers))
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last assignment counts
    used = np.argsort(first, kind="stable")[: int((first < len(numbers)).sum())]
    place = np.zeros(size, np.int64)
    place[used] = np.arange(len(used))
    return used, place


def _check(
    declared: Declared, tensor: Positions, ndim: Positions, distinct: Distinct, table: LayoutTable
) -> None:
    """Check that every segment has a tensor, and as many dimensions as that, `ndim` by tensor."""
    numbers = tensor[distinct.numbers[distinct.segments.tensor]]
    bad = numbers < 0
    bad[~bad] = ndim[numbers[~bad]] != distinct.segments.ndim[~bad]
    if not bad.any():
        return
    segment = table.rank_layout().segments[int(bad.argmax())]
    name, tied = segment.tensor, dict(declared.tied)
    if name in tied:
        raise PlanError(name, f"tied to {tied[name]}, so it has no segments; give them to {tied[name]}")
    if name not in declared.tensors:
        raise PlanError(name, f"a segment names it, no rank declares it; {suggest(name, declared.tensors)}")
    meta = declared.tensors[name]
    check_lengths(segment, [meta], len(meta.shape))
