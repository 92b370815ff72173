"""The plan: which bytes travel, in which bucket, from which trainer. Frozen; equal in every member."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weightsync.plan.broadcast.buckets import PIECE_ALIGN, RUN_ALIGN, align
from weightsync.plan.broadcast.explain import Cluster, Explanation
from weightsync.plan.layout.draft import in_model
from weightsync.plan.layout.layout import Int32, Int64, columns
from weightsync.plan.layout.members import Members
from weightsync.plan.layout.replicas import Replicas
from weightsync.plan.layout.segment import Box, RankLayout, Segment, TensorMeta

GAP_NBYTES = 256 << 10
"""Bytes that are copied in about the time in which another copy starts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of `Plan.tensors[tensor]`, row-major and contiguous in its bucket.

    `offset` is the piece's first byte in the bucket, `send_buffer_offset` in `trainer`'s send buffer.
    """

    tensor: int
    box: Box
    trainer: int
    bucket: int
    offset: int
    nbytes: int
    send_buffer_offset: int


@dataclass(frozen=True, slots=True)
class Step:
    """One broadcast: holder `root` sends `nbytes` from `trainer`'s send buffer to a bucket's `offset`."""

    index: int
    bucket: int
    root: int
    trainer: int
    offset: int
    nbytes: int
    send_buffer_offset: int


@dataclass(frozen=True, slots=True)
class Portion:
    """`nbytes` bytes of a bucket from `offset` on, at `source` in the share of trainer rank `part`."""

    part: int
    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket, with `nbytes` in use."""

    index: int
    nbytes: int
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan:
    """Which bytes go where: all tensors for all engines, as buckets to broadcast. Made by `make_plan`.

    It holds S steps (broadcasts) and P pieces as columns, both in the order of sending. D is the largest
    number of dimensions. If all engines read directly there are none: `make_direct_plan`.

    Attributes:
        epoch: number of the membership.
        members: which holder serves which rank.
        tensors: the tensors that travel, without tied aliases.
        tied: (alias, canonical) pairs.
        bucket_bytes: the most bytes of a bucket.
        slots: buckets per holder; 0 if nothing is broadcast.
        piece_tensor: int32[P], index into `tensors`.
        piece_offset, piece_extent: int32[P, D] or int64[P, D], each piece's box, in elements.
        step_piece: int32[S + 1], each step's first piece.
        step_trainer: int32[S], the trainer rank whose bytes are sent.
        step_offset: int64[S], first byte in the bucket.
        step_nbytes: int64[S], bytes of the step.
        step_send_buffer: int64[S], first byte in the trainer's send buffer.
        bucket_step: int32[num_buckets + 1], each bucket's first step.
        frozen: indices of the `tensors` that do not change after the first update. The last buckets
            have them, and no others.
        replicas: which ranks hold the same box and, without pieces, which of them digests it. None if each
            box is held by one.
    """

    epoch: int
    members: Members
    tensors: tuple[TensorMeta, ...]
    tied: tuple[tuple[str, str], ...]
    bucket_bytes: int
    slots: int
    piece_tensor: Int32
    piece_offset: Int32 | Int64
    piece_extent: Int32 | Int64
    step_piece: Int32
    step_trainer: Int32
    step_offset: Int64
    step_nbytes: Int64
    step_send_buffer: Int64
    bucket_step: Int32
    frozen: tuple[int, ...] = ()
    replicas: Replicas | None = None

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.bucket_step) - 1

    @property
    def num_changing_buckets(self) -> int:
        """Number of buckets before the buckets of frozen tensors."""
        firsts = self.piece_tensor[self.step_piece[self.bucket_step[:-1]]]
        return self.num_buckets - int(np.isin(firsts, self.frozen).sum())

    @property
    def num_pieces(self) -> int:
        """Number of pieces."""
        return len(self.piece_tensor)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order. They are built on each call: inside an update use `bucket_steps`."""
        return tuple(step for index in range(self.num_buckets) for step in self.bucket_steps(index))

    @property
    def total_nbytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(meta.nbytes for meta in self.tensors)

    def bucket(self, index: int) -> Bucket:
        """Return bucket number `index`, in time proportional to the bucket's pieces."""
        steps = self.bucket_steps(index)
        nbytes = steps[-1].offset + -(-steps[-1].nbytes // RUN_ALIGN) * RUN_ALIGN
        return Bucket(index, nbytes, tuple(piece for step in steps for piece in self._pieces(step)), steps)

    def buckets(self) -> Iterator[Bucket]:
        """Iterate over all buckets in order."""
        return (self.bucket(index) for index in range(self.num_buckets))

    def trainer_pieces(self, trainer: int) -> tuple[Piece, ...]:
        """Return the pieces that rank `trainer` sends, in the order of the send buffer."""
        buckets = np.repeat(np.arange(self.num_buckets), np.diff(self.bucket_step))
        steps = np.flatnonzero(self.step_trainer == trainer).tolist()
        return tuple(piece for i in steps for piece in self._pieces(self._step(i, int(buckets[i]))))

    def send_buffer_nbytes(self, trainer: int) -> int:
        """Return the bytes of rank `trainer`'s send buffer, alignment included."""
        return int(align(self.step_nbytes[self.step_trainer == trainer], RUN_ALIGN).sum())

    def staging_nbytes(self, holder: int) -> int:
        """Return the bytes of a holder's buckets: `slots` of the largest; 0 if it receives nothing."""
        return self.slots * self.max_bucket_nbytes if holder in self.members.receivers else 0

    @property
    def max_bucket_nbytes(self) -> int:
        """Bytes of the largest bucket, alignment included."""
        return int((self.step_offset + align(self.step_nbytes, RUN_ALIGN)).max(initial=0))

    @property
    def target_nbytes(self) -> int:
        """Bytes of a buffer that a refill reads into: a bucket's bytes, or the most of any bucket."""
        most = min(self.bucket_bytes, self.total_nbytes + RUN_ALIGN) // RUN_ALIGN * RUN_ALIGN
        return self.max_bucket_nbytes or most

    def digest(self, content: str = "") -> str:
        """Return the SHA-256, in hexadecimal, of everything that the members must agree on.

        `content`: the result of `content()`, if it is known.
        """
        header = {
            "epoch": self.epoch,
            "holders": self.members.num_holders,
            "trainers": self.members.trainers,
            "engines": sorted(self.members.engines),
            "content": content or self.content(),
        }
        return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()

    def content(self) -> str:
        """Return the SHA-256, in hexadecimal, of the layout of send buffers and buckets, without members."""
        header = {
            "tensors": [(meta.name, meta.dtype, meta.shape) for meta in self.tensors],
            "tied": self.tied,
            "bucket_bytes": self.bucket_bytes,
            "slots": self.slots,
            "frozen": self.frozen,
        }
        state = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        replicas = columns(self.replicas) if self.replicas else {}
        for column in (*columns(self).values(), *replicas.values()):
            state.update(f"{column.shape}".encode())
            state.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return state.hexdigest()

    def explain(self, cluster: Cluster | None = None) -> Explanation:
        """Return figures of this plan; `print` shows them.

        Args:
            cluster: bandwidths; without them there are no times.
        """
        trainers = range(len(self.members.trainers))
        return Explanation.of(
            self.members,
            np.bincount(self.step_trainer, self.step_nbytes, len(trainers)).astype(np.int64),
            np.array([self.send_buffer_nbytes(trainer) for trainer in trainers], np.int64),
            self.slots * self.max_bucket_nbytes,
            cluster,
            num_tensors=len(self.tensors),
            num_buckets=self.num_buckets,
            num_steps=len(self.step_trainer),
            num_pieces=self.num_pieces,
            payload_nbytes=self.total_nbytes,
        )

    def bucket_steps(self, bucket: int) -> tuple[Step, ...]:
        """Return the steps that fill bucket number `bucket`, in order."""
        low, high = self.bucket_step[bucket : bucket + 2].tolist()
        return tuple(self._step(index, bucket) for index in range(low, high))

    def _step(self, index: int, bucket: int) -> Step:
        trainer = int(self.step_trainer[index])
        return Step(
            index,
            bucket,
            self.members.trainers[trainer],
            trainer,
            int(self.step_offset[index]),
            int(self.step_nbytes[index]),
            int(self.step_send_buffer[index]),
        )

    def _pieces(self, step: Step) -> Iterator[Piece]:
        rows = slice(*self.step_piece[step.index : step.index + 2].tolist())
        at = 0
        for tensor, offset, extent in zip(
            self.piece_tensor[rows].tolist(),
            self.piece_offset[rows].tolist(),
            self.piece_extent[rows].tolist(),
            strict=True,
        ):
            meta = self.tensors[tensor]
            ndim = len(meta.shape)
            box = Box(tuple(offset[:ndim]), tuple(extent[:ndim]))
            nbytes = box.numel * meta.itemsize
            yield Piece(
                tensor, box, step.trainer, step.bucket, step.offset + at, nbytes, step.send_buffer_offset + at
            )
            at += -(-nbytes // PIECE_ALIGN) * PIECE_ALIGN


def by_tensor(plan: Plan, layout: RankLayout) -> list[list[Segment]]:
    """Return the layout's segments for each tensor of the plan.

    A segment under a tied name counts for the tensor that is sent. So does a segment of a draft's tensor in a
    trainer's model.
    """
    canonical = dict(layout.tied)
    taken = {*(meta.name for meta in plan.tensors), *dict(plan.tied)}
    held: dict[str, list[Segment]] = {}
    for segment in layout.segments:
        if segment.box.numel:
            held.setdefault(segment.tensor, []).append(segment)

    def of(name: str) -> list[Segment]:
        return held.get(name) or held.get(canonical.get(name, "")) or held.get(in_model(name, taken)) or []

    return [of(meta.name) for meta in plan.tensors]


def share_in_place(plan: Plan, trainer: int, layout: RankLayout) -> list[tuple[int, Box, Segment]]:
    """Return the boxes of `layout` that rank `trainer` digests in its own memory.

    Each row has the number of a tensor, a box of it, and the segment that holds the box. The shares of all
    ranks contain every element once. With pieces, a share is the rank's own pieces. Without pieces, a share
    is all boxes of the rank, except boxes that are another rank's turn (`Plan.replicas`).
    """
    segments = by_tensor(plan, layout)
    if not plan.num_pieces:
        turns = plan.replicas.turns(trainer) if plan.replicas else None
        return [
            (number, each.box, each)
            for number, held in enumerate(segments)
            for each in held
            if not turns or turns.has(number, each.box)
        ]
    held = [deque(each) for each in segments]
    return [
        (piece.tensor, piece.box, holding(held[piece.tensor], piece.box))
        for piece in plan.trainer_pieces(trainer)
    ]


def holding(segments: deque[Segment], box: Box) -> Segment:
    """Return the segment that contains `box`, and have the next search begin with it.

    A stack of experts has hundreds of segments. Pieces come in about their order.
    """
    while segments[0].box != box and not segments[0].box.contains(box):
        segments.rotate(-1)
    return segments[0]


def all_portions(plan: Plan, bucket: int) -> list[Portion]:
    """Return the portions of a whole bucket, one for each trainer rank that sends."""
    steps = plan.bucket_steps(bucket)
    return [Portion(step.trainer, step.send_buffer_offset, step.offset, step.nbytes) for step in steps]


def needed_portions(plan: Plan, bucket: int, segments: Sequence[Sequence[Segment]]) -> list[Portion]:
    """Return the portions of a bucket that a rank needs, in the bucket's order.

    `segments` are the rank's segments by tensor, as of `by_tensor`. Of each piece, all bytes from the first
    that the rank needs to the last are one portion. Portions of one trainer rank that are close are joined.
    """
    found: list[Portion] = []
    for portion in _portions(plan, bucket, segments):
        last = found[-1] if found else None
        # A trainer rank's share of a bucket is one run of bytes, in both places.
        is_same = last and last.part == portion.part
        if last and is_same and portion.offset - (last.offset + last.nbytes) <= GAP_NBYTES:
            found[-1] = replace(last, nbytes=portion.offset + portion.nbytes - last.offset)
        else:
            found.append(portion)
    return found


def _portions(plan: Plan, bucket: int, segments: Sequence[Sequence[Segment]]) -> Iterator[Portion]:
    for piece in plan.bucket(bucket).pieces:
        first, end = _range(piece, segments[piece.tensor], plan.tensors[piece.tensor].itemsize)
        if first < end:
            yield Portion(piece.trainer, piece.send_buffer_offset + first, piece.offset + first, end - first)


def _range(piece: Piece, segments: Sequence[Segment], itemsize: int) -> tuple[int, int]:
    """Return the first byte of a piece that a segment needs, and the end of the last."""
    strides, first, end = piece.box.strides(itemsize), piece.nbytes, 0
    for segment in segments:
        if part := piece.box.intersect(segment.box):
            start = piece.box.distance(part, strides)
            length = sum((extent - 1) * stride for extent, stride in zip(part.extent, strides, strict=True))
            first, end = min(first, start), max(end, start + length + itemsize)
    return first, end
