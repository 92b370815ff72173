"""Turns runs of a flattened tensor into boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weightsync.plan.layout.segment import Box, Segment, TensorMeta


def run_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that hold elements `start` to `stop` of a row-major tensor, in their order.

    A run that begins and ends within rows takes up to ``2 * ndim - 1`` boxes. `stop` is at most the number
    of elements.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(last, shape, 0, tail)


def run_segments(meta: TensorMeta, start: int, stop: int, buffer: str) -> tuple[Segment, ...]:
    """Return the segments of a run of a tensor's elements that fills `buffer` from the first byte."""
    strides = Box.whole(meta.shape).strides(meta.itemsize)
    return tuple(
        Segment(
            meta.name,
            box,
            buffer,
            Box.whole(meta.shape).distance(box, strides) - start * meta.itemsize,
            strides,
        )
        for box in run_boxes(meta.shape, start, stop)
    )


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in run_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.extent))
