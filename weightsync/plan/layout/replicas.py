"""Says which trainer ranks hold the same box of a tensor, which of them digests it, and when all do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weightsync.plan.layout.column import Column, narrowed, repeated
from weightsync.plan.layout.layout import Bool, Int64, Layout
from weightsync.plan.layout.match import Match, Shards
from weightsync.plan.layout.segment import Box
from weightsync.plan.layout.tensor_rows import first_alike, firsts

MOST_ROUNDS = 16
"""Updates in which each box that several ranks hold is compared once, after a first one that compares all.

A rank that missed a step differs everywhere, so the next update finds it. To digest one sixteenth of a rank's
boxes takes little beside moving them all.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """n boxes of ranks, for one of the tensors that all ranks cut alike.

    If nothing else chooses the rank that digests a box, the ranks that hold the box take turns: each of m
    ranks digests every m-th tensor of a kind. Kinds start with different ranks.

    Attributes:
        kind: int[T], by tensor of the plan: equal numbers for tensors that are cut alike.
        of_kind, trainer, place, count: int[n], the kind of a box's tensor, the rank that holds the box, the
            rank's place among all ranks that hold the box, and the number of these ranks.
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
        if shards.are_alone:
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

    @classmethod
    def of_pieces(cls, source: Layout, matched: Match, shards: Shards) -> Replicas | None:
        """Make them of the `shards` of all tensors, which are not alone."""
        nowhere = np.zeros_like(source.byte_offset), np.zeros_like(source.strides)
        alike = first_alike(replace(source, byte_offset=nowhere[0], strides=nowhere[1]))
        first, kind = np.unique(firsts(alike[matched.source]), return_inverse=True)
        return cls.of(kind, kind, source, shards.of_tensors(first))

    @property
    def num_rounds(self) -> int:
        """In how many rounds the tensors that several ranks hold are compared. None of them is empty."""
        return min(MOST_ROUNDS, int(self._is_shared().sum()))

    def _is_shared(self) -> Bool:
        shared: Bool = np.isin(self.kind, self.of_kind[self.count > 1])
        return shared

    def _rounds(self) -> Int64:
        """Return the round of each tensor. Tensors of a kind are spread over all rounds."""
        rounds = np.zeros(len(self.kind), np.int64)
        shared = np.flatnonzero(self._is_shared())
        order = shared[np.argsort(self.kind[shared], kind="stable")]
        rounds[order] = np.arange(len(order)) % self.num_rounds
        return rounds

    def claims(self, trainer: int) -> SharedBoxes:
        """Return the boxes that rank `trainer` and other ranks hold."""
        kind, is_first = self.kind.astype(np.int64), self.place == 0
        box = np.cumsum(is_first) - 1
        num_boxes = np.bincount(self.of_kind[is_first], minlength=int(kind.max()) + 1)
        first = np.searchsorted(self.of_kind[is_first], np.arange(len(num_boxes)))
        rows = np.flatnonzero((self.trainer == trainer) & (self.count > 1))
        held = np.bincount(self.of_kind[rows], minlength=len(num_boxes))
        tensor, nth = repeated(held[kind])
        rows = rows[(np.cumsum(held) - held)[kind[tensor]] + nth]
        before = np.cumsum(num_boxes[kind]) - num_boxes[kind]
        return SharedBoxes(
            tensor,
            before[tensor] + box[rows] - first[kind[tensor]],
            self.offset[rows].astype(np.int64),
            self.place[rows].astype(np.int64),
            self.count[rows].astype(np.int64),
            self._rounds()[tensor],
        )

    def turns(self, trainer: int) -> Turns:
        """Return the turns, which say which boxes rank `trainer` digests."""
        rows = np.flatnonzero(self.trainer == trainer)
        columns = (self.of_kind[rows], self.place[rows], self.count[rows])
        offsets = map(tuple, self.offset[rows].tolist())
        held = zip(*(column.tolist() for column in columns), offsets, strict=True)
        place = {(kind, offset): (at, of) for kind, at, of, offset in held}
        return Turns(self.kind.tolist(), self._turn().tolist(), self.offset.shape[1], place)

    def _turn(self) -> Int64:
        """Return the index of each tensor within its kind, plus the number of the kind."""
        kind = self.kind.astype(np.int64)
        order, count = np.argsort(kind, kind="stable"), np.bincount(kind)
        turn = np.empty_like(kind)
        turn[order] = np.arange(len(kind)) - np.repeat(np.cumsum(count) - count, count) + kind[order]
        return turn


@dataclass(frozen=True, slots=True, eq=False)
class SharedBoxes:
    """n boxes that a rank and other ranks hold, by tensor, then by first element.

    Attributes:
        tensor: int64[n], the number of the plan's tensor.
        box: int64[n], a number for each box of the plan's tensors.
        offset: int64[n, D], the first element of each box.
        place, count: int64[n], the rank's place among the ranks that hold the box, and their number.
        round: int64[n], the round in which all these ranks digest the box.
    """

    tensor: Int64
    box: Int64
    offset: Int64
    place: Int64
    count: Int64
    round: Int64


@dataclass(frozen=True, slots=True)
class Turns:
    """One rank's turns. Boxes are known by their tensor's kind and their first element."""

    kind: list[int]
    turn: list[int]
    num_dims: int
    place: dict[tuple[int, tuple[int, ...]], tuple[int, int]]

    def has(self, tensor: int, box: Box) -> bool:
        """Return True if the rank digests its `box` of tensor number `tensor`.

        `box` must be a box of the rank.
        """
        offset = (*box.offset, *[0] * (self.num_dims - len(box.offset)))
        # A box without elements is not known.
        place, count = self.place.get((self.kind[tensor], offset), (0, 1))
        return self.turn[tensor] % count == place
