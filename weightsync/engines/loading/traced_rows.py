"""Describes a traced segment of a loader in the filled matrix: whole rows, and the block."""

from __future__ import annotations

from weightsync.plan import Box, Segment


def is_whole_rows(segment: Segment, columns: int, itemsize: int) -> bool:
    """Return True if a segment is whole rows of a matrix, or of matrices in a stack, without gaps."""
    box, pitch = segment.box, columns * itemsize
    steps = zip(box.extent, segment.strides, (pitch, itemsize), strict=False)
    is_rows = box.ndim == 2 and all(size == 1 or stride == step for size, stride, step in steps)
    return is_rows and box.extent[1] == columns and segment.byte_offset % pitch == 0


def block_number(box: Box) -> tuple[int, ...]:
    """Return the number of a block along each axis, where all blocks are as large as it."""
    return tuple(at // size for at, size in zip(box.offset, box.extent, strict=True))
