"""The different boxes that the trainers hold, and who holds each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import PlanError
from weightsync.plan.buffers import Int64
from weightsync.plan.coverage import check_tiling, first_element
from weightsync.plan.layout import Layout
from weightsync.plan.match import Match

__all__ = ["Shards"]


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """g boxes, proven to tile every tensor; ordered by travelling tensor, then by first element.

    Attributes:
        tensor: int64[g], the travelling tensor of each box.
        rows: int64[m], rows of the source's layout: the replicas of box 0 by rank, those of box 1, ...
        start, size: int64[g], where in `rows` the replicas of a box start, and how many there are.
    """

    tensor: Int64
    rows: Int64
    start: Int64
    size: Int64

    @classmethod
    def of(cls, source: Layout, matched: Match) -> Shards:
        """Groups the source's segments, empty ones left out.

        Raises:
            PlanError: names a tensor whose boxes leave a hole, overlap, or are declared twice by a rank.
        """
        rows, tensor = _source_rows(source, matched)
        offset, extent = source.offset[rows], source.extent[rows]
        same = np.zeros(len(rows), np.bool_)
        same[1:] = (
            (tensor[1:] == tensor[:-1])
            & (offset[1:] == offset[:-1]).all(axis=1)
            & (extent[1:] == extent[:-1]).all(axis=1)
        )
        _check_twice(matched, same, tensor, source.rank[rows].astype(np.int64))
        start = np.flatnonzero(~same)
        shape = source.shape[matched.source]
        check_tiling(matched.tensors, shape, tensor[start], offset[start], extent[start])
        return cls(tensor[start], rows, start, np.diff(np.append(start, len(rows))))

    @property
    def first(self) -> Int64:
        """int64[g], a row of the source's layout for each box."""
        return self.rows[self.start]


def _source_rows(source: Layout, matched: Match) -> tuple[Int64, Int64]:
    """Rows of the source's segments and the tensor they are sent as, empty boxes left out.

    Ordered by travelling tensor, then by first element, then by rank.
    """
    held: Int64 = np.flatnonzero((source.extent > 0).all(axis=1))
    numel = source.shape.prod(axis=1)
    base = np.cumsum(numel) - numel
    owner = source.tensor[held]
    key = base[owner] + first_element(source.offset[held], source.shape[owner])
    held = held[np.argsort(key, kind="stable")]
    counts = np.bincount(source.tensor[held], minlength=len(source.tensors))
    first = (np.cumsum(counts) - counts)[matched.source]
    times = counts[matched.source]
    tensor: Int64 = np.repeat(np.arange(len(times)), times)
    nth = np.arange(len(tensor)) - np.repeat(np.cumsum(times) - times, times)
    return held[first[tensor] + nth], tensor


def _check_twice(matched: Match, same: npt.NDArray[np.bool_], tensor: Int64, rank: Int64) -> None:
    twice = np.flatnonzero(same[1:] & (rank[1:] == rank[:-1]))
    if len(twice):
        row = int(twice[0])
        raise PlanError(
            matched.tensors[int(tensor[row])].name,
            f"trainer rank {int(rank[row])} declares one box of it twice; declare each box once",
        )
