"""2-D copies between buckets, or portions of them, and the segments of one rank's memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weightsync.plan import Box, Piece, Plan, Segment
from weightsync.plan.broadcast.plan import Portion
from weightsync.plan.layout.copies import BoxCopy, Copies, box_copies


def _meeting_boxes(
    box: Box,
    start: int,
    segments: Sequence[Segment],
    address: Mapping[str, int],
    itemsize: int,
    *,
    into: bool,
) -> Iterator[BoxCopy]:
    """Yield the copies between a contiguous `box` at address `start` and its `segments`.

    `address` has the first byte of each buffer. With `into`, copies write the segments, otherwise they read.
    """
    strides = box.strides(itemsize)
    for segment in segments:
        part = box.intersect(segment.box)
        if part is None:
            continue
        slot = (start + box.distance(part, strides), strides)
        held = (address[segment.buffer] + segment.start(part), segment.strides)
        yield part.extent, itemsize, *((*slot, *held) if into else (*held, *slot))


def bucket_rows(
    plan: Plan,
    segments: Sequence[Sequence[Segment]],
    address: Mapping[str, int],
    slots: Sequence[int],
    *,
    into: bool,
    only: Callable[[Piece], bool] = lambda _: True,
) -> tuple[Copies, list[int]]:
    """Return all copies between `slots` and one rank's segments, bucket by bucket.

    Args as in `_meeting_boxes`; `slots` are addresses, `only` selects pieces. Also returns the index of each
    bucket's first copy, with the end as the last entry. Without slots there are no copies.
    """
    boxes: list[BoxCopy] = []
    bounds = [0]
    for index in range(plan.num_buckets if slots else 0):
        base = slots[index % len(slots)]
        for piece in plan.bucket(index).pieces:
            if only(piece):
                itemsize = plan.tensors[piece.tensor].itemsize
                held = segments[piece.tensor]
                boxes += _meeting_boxes(piece.box, base + piece.offset, held, address, itemsize, into=into)
        bounds.append(len(boxes))
    table, parent = box_copies(boxes)
    return Copies(*table.T), np.searchsorted(parent, bounds).tolist()


def portion_rows(
    plan: Plan,
    segments: Sequence[Sequence[Segment]],
    address: Mapping[str, int],
    needs: Sequence[Sequence[Portion]],
    places: Sequence[Sequence[int]],
) -> Copies:
    """Return all copies from portions of buckets to one rank's segments.

    Args:
        segments, address: as in `bucket_rows`.
        needs: by bucket, the portions that the rank needs, as of `needed_portions`.
        places: the addresses of the portions.
    """
    boxes: list[BoxCopy] = []
    for index, portions in enumerate(needs):
        offsets = [portion.offset for portion in portions]
        for piece in plan.bucket(index).pieces if portions else ():
            # The needed part of a piece is in one portion, the last that begins before the piece ends.
            nth = max(bisect_left(offsets, piece.offset + piece.nbytes) - 1, 0)
            start = places[index][nth] + piece.offset - offsets[nth]
            itemsize = plan.tensors[piece.tensor].itemsize
            boxes += _meeting_boxes(piece.box, start, segments[piece.tensor], address, itemsize, into=True)
    return Copies(*box_copies(boxes)[0].T)
