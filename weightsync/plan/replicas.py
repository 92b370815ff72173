"""Says which of the trainer ranks that hold the same box of a tensor digests it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightsync.plan.column import Column, narrowed
from weightsync.plan.copies import repeated
from weightsync.plan.layout import Int64, Layout
from weightsync.plan.match import Shards
from weightsync.plan.segment import Box


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """n boxes that ranks hold, of one tensor of those that all ranks cut alike.

    The ranks that hold a box take turns: with m of them, each digests every m-th tensor of a kind. Kinds
    start with different ranks.

    Attributes:
        kind: int[T], by tensor of the plan: a number for those that are cut alike.
        of_kind, trainer, place, count: int[n], the kind of a box's tensor, the rank that holds it, its place
            among those that hold it, and their number.
        offset: int[n, D], the first element of each box.
    """

    kind: Column
    of_kind: Column
    trainer: Column
    place: Column
    count: Column
    offset: Column

    @classmethod
    def of(cls, kind: Int64, of_kind: Int64, listed: Layout, shards: Shards) -> Replicas | None:
        """Make them of the `shards` of one tensor of each kind. None if each box is held by one rank.

        `of_kind` has the kind of each tensor of `shards`.
        """
        if (shards.size == 1).all():
            return None
        box, place = repeated(shards.size)
        return cls(
            narrowed(kind),
            narrowed(of_kind[shards.tensor[box]]),
            narrowed(listed.rank[shards.rows].astype(np.int64)),
            narrowed(place),
            narrowed(shards.size[box]),
            narrowed(listed.offset[shards.rows]),
        )

    def turns(self, trainer: int) -> Turns:
        """Return what says which boxes rank `trainer` digests."""
        rows = np.flatnonzero(self.trainer == trainer)
        columns = (self.of_kind[rows], self.place[rows], self.count[rows])
        offsets = map(tuple, self.offset[rows].tolist())
        held = zip(*(column.tolist() for column in columns), offsets, strict=True)
        place = {(kind, offset): (at, of) for kind, at, of, offset in held}
        return Turns(self.kind.tolist(), self._turn().tolist(), self.offset.shape[1], place)

    def _turn(self) -> Int64:
        """Return each tensor's number among those of its kind, and the number of the kind added to it."""
        kind = self.kind.astype(np.int64)
        order, count = np.argsort(kind, kind="stable"), np.bincount(kind)
        turn = np.empty_like(kind)
        turn[order] = np.arange(len(kind)) - np.repeat(np.cumsum(count) - count, count) + kind[order]
        return turn


@dataclass(frozen=True, slots=True)
class Turns:
    """One rank's turns. Boxes are known by their tensor's kind and their first element."""

    kind: list[int]
    turn: list[int]
    num_dims: int
    place: dict[tuple[int, tuple[int, ...]], tuple[int, int]]

    def has(self, tensor: int, box: Box) -> bool:
        """Whether the rank digests its `box` of tensor number `tensor`. No other one may be given."""
        offset = (*box.offset, *[0] * (self.num_dims - len(box.offset)))
        # A box without elements is not known.
        place, count = self.place.get((self.kind[tensor], offset), (0, 1))
        return self.turn[tensor] % count == place
