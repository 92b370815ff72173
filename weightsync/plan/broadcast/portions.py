"""Portions of buckets that an engine rank needs, and their places in trainers' shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weightsync.plan.broadcast.plan import Piece, Plan, Portion
from weightsync.plan.layout.segment import Segment

GAP_NBYTES = 256 << 10
"""Bytes that are copied in about the time in which another copy starts."""


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
