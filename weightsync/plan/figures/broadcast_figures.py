"""Works out a broadcast plan's figures in kinds of alike tensors, without pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from weightsync.plan.broadcast.broadcast import check_limits, check_members, check_sides, check_staging
from weightsync.plan.broadcast.buckets import PIECE_ALIGN, RUN_ALIGN, Pieces, align, cut, split_large
from weightsync.plan.broadcast.explain import Cluster, Explanation
from weightsync.plan.direct.alike_shards import AlikeShards
from weightsync.plan.layout.balance import spread
from weightsync.plan.layout.column import repeated
from weightsync.plan.layout.layout import Int64, Layout
from weightsync.plan.layout.members import Members
from weightsync.plan.layout.trainers_layout import StatedLayout


def explain_broadcast(
    source: StatedLayout,
    engines: Mapping[str, Layout],
    members: Members,
    cluster: Cluster | None = None,
    *,
    bucket_bytes: int,
    max_staging_bytes: int,
    slots: int = 2,
) -> Explanation:
    """Return the figures of the plan that `make_plan` makes, see `Plan.explain`.

    Takes time and memory for the tensors, and for each trainer rank in each bucket, but not for the pieces: a
    thousand ranks of a model with ten thousands of tensors have as many as the product. No tensor may be
    frozen. Other arguments and errors are the same as of `make_plan`.
    """
    check_members(source.num_ranks, engines, members)
    assert not source.stated.frozen, "frozen tensors have buckets of their own"
    matched = check_sides(source.stated, engines)
    check_limits(bucket_bytes, slots, np.array([meta.itemsize for meta in matched.tensors], np.int64))
    alike = AlikeShards.of(source, matched)
    itemsize = np.array([matched.tensors[t].itemsize for t in alike.first.tolist()], np.int64)
    pieces = _AlikePieces.of(alike, itemsize, bucket_bytes // RUN_ALIGN * RUN_ALIGN)
    sizes = pieces.step_sizes(source.num_ranks)
    aligned = align(sizes, RUN_ALIGN)
    max_bucket_nbytes = int(aligned.sum(axis=0).max(initial=0))
    check_staging(slots, max_bucket_nbytes, max_staging_bytes)
    return Explanation.of(
        members,
        sizes.sum(axis=1),
        aligned.sum(axis=1),
        slots * max_bucket_nbytes,
        cluster,
        num_tensors=len(matched.tensors),
        num_buckets=sizes.shape[1],
        num_steps=int(np.count_nonzero(sizes)),
        num_pieces=pieces.count,
        payload_nbytes=sum(meta.nbytes for meta in matched.tensors),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _AlikePieces:
    """The pieces of one tensor of each kind, and the buckets of all tensors.

    Attributes:
        alike: the kinds, and the boxes of one tensor per kind.
        nbytes: int64[boxes], the bytes of each box.
        box, size: int64[P], a piece's box and bytes in a bucket. Pieces of a box follow each other.
        unit: int64[P], the index of a piece's unit within the tensor; see `Pieces`.
        bucket: int64[U], the bucket of each unit of all tensors.
        first_unit: int64[T], the first unit of each tensor.
    """

    alike: AlikeShards
    nbytes: Int64
    box: Int64
    size: Int64
    unit: Int64
    bucket: Int64
    first_unit: Int64

    @classmethod
    def of(cls, alike: AlikeShards, itemsize: Int64, capacity: int) -> _AlikePieces:
        """Cut into buckets of `capacity` bytes. `itemsize` is per kind."""
        shards, num_kinds = alike.shards, len(alike.first)
        offset, extent = alike.listed.offset[shards.first], alike.listed.extent[shards.first]
        nbytes = extent.prod(axis=1) * itemsize[shards.tensor]
        # Which rank sends a box differs by tensor. Sizes do not, so boxes take the ranks' place here.
        boxes = Pieces(shards.tensor, np.arange(len(nbytes)), offset, extent, nbytes, shards.tensor)
        pieces = split_large(boxes, itemsize, capacity)
        _, unit = np.unique(pieces.unit, return_inverse=True)
        starts = np.flatnonzero(np.diff(unit, prepend=-1))
        of_kind = pieces.tensor[starts]
        num_units = np.bincount(of_kind, minlength=num_kinds)
        before = np.cumsum(num_units) - num_units
        unit_nbytes = np.bincount(unit, align(pieces.nbytes, RUN_ALIGN), len(starts)).astype(np.int64)
        tensor, nth = repeated(num_units[alike.kind])
        all_nbytes = unit_nbytes[before[alike.kind[tensor]] + nth]
        all_units = num_units[alike.kind]
        by_box = np.argsort(pieces.trainer, kind="stable")
        return cls(
            alike=alike,
            nbytes=nbytes,
            box=pieces.trainer[by_box],
            size=align(pieces.nbytes, PIECE_ALIGN)[by_box],
            unit=(unit - before[pieces.tensor])[by_box],
            bucket=cut(np.arange(len(all_nbytes)), all_nbytes, capacity),
            first_unit=np.cumsum(all_units) - all_units,
        )

    @property
    def count(self) -> int:
        """Number of pieces of all tensors."""
        shards, times = self.alike.shards, np.bincount(self.alike.kind, minlength=len(self.alike.first))
        return int(times[shards.tensor[self.box]].sum())

    def step_sizes(self, num_trainers: int) -> Int64:
        """Return the bytes that each trainer rank sends in each bucket: int64[num_trainers, num_buckets]."""
        num_buckets = int(self.bucket.max(initial=-1)) + 1
        sizes = np.zeros((num_trainers, num_buckets), np.int64)
        loads = np.zeros(num_trainers, np.int64)
        num_pieces = np.bincount(self.box, minlength=len(self.nbytes))
        first_piece = np.cumsum(num_pieces) - num_pieces
        for ranks, boxes in self._by_ranks():
            tensor, box = self._of_all_tensors(boxes)
            if len(ranks) == 1:
                picks = np.zeros_like(box)
                loads[ranks] += self.nbytes[box].sum()
            else:
                picks, loads[ranks] = spread(self.nbytes[box], loads[ranks])
            item, nth = repeated(num_pieces[box])
            piece = first_piece[box[item]] + nth
            bucket = self.bucket[self.first_unit[tensor[item]] + self.unit[piece]]
            at, shape = picks[item] * num_buckets + bucket, (len(ranks), num_buckets)
            sizes[ranks] += np.bincount(at, self.size[piece], np.prod(shape)).astype(np.int64).reshape(shape)
        return sizes

    def _by_ranks(self) -> Iterator[tuple[Int64, Int64]]:
        """Yield ranks that hold the same boxes, and these, in the order of `balance.choose`."""
        shards, rank = self.alike.shards, self.alike.listed.rank
        found: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for box, (start, size) in enumerate(zip(shards.start.tolist(), shards.size.tolist(), strict=True)):
            found[tuple(rank[shards.rows[start : start + size]].tolist())].append(box)
        for ranks, boxes in sorted(found.items(), key=lambda each: (len(each[0]), each[0])):
            yield np.array(ranks, np.int64), np.array(boxes, np.int64)

    def _of_all_tensors(self, boxes: Int64) -> tuple[Int64, Int64]:
        """Return tensor and box in sending order, with an entry per tensor and box of `boxes`."""
        count = np.bincount(self.alike.shards.tensor[boxes], minlength=len(self.alike.first))
        tensor, nth = repeated(count[self.alike.kind])
        return tensor, boxes[(np.cumsum(count) - count)[self.alike.kind[tensor]] + nth]
