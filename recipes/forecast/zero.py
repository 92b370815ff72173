"""Makes the layout of trainers that DeepSpeed ZeRO-3 shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsync.plan import Layout, TensorMeta
from weightsync.plan.layout.layout import Int64, padded
from weightsync.plan.layout.runs import run_segments


def zero_layout(
    tensors: Sequence[TensorMeta], num_ranks: int, tied: tuple[tuple[str, str], ...], whole: Sequence[int]
) -> Layout:
    """Return the layout of ZeRO-3 ranks: equal runs of each tensor's flattened elements.

    `whole` are positions of tensors that are no parameters: each rank has all of them.
    """
    alike: dict[tuple[TensorMeta, int], list[int]] = {}
    buffers = set(whole)
    for number, meta in enumerate(tensors):
        num_parts = 1 if number in buffers else num_ranks
        alike.setdefault((TensorMeta("", meta.dtype, meta.shape), num_parts), []).append(number)
    ndim = max(len(meta.shape) for meta in tensors)
    columns = [_columns(meta, numbers, parts, num_ranks, ndim) for (meta, parts), numbers in alike.items()]
    tensor, rank, byte_offset, offset, extent, strides = map(np.concatenate, zip(*columns, strict=True))
    return Layout.from_columns(
        tensors=tuple(tensors),
        num_ranks=num_ranks,
        tensor=tensor.astype(np.int32),
        rank=rank.astype(np.int32),
        offset=offset,
        extent=extent,
        byte_offset=byte_offset,
        strides=strides,
        tied=tied,
    )


def _columns(
    meta: TensorMeta, numbers: Sequence[int], num_parts: int, num_ranks: int, ndim: int
) -> tuple[Int64, ...]:
    """Return the columns of tensors of one shape: tensor, rank, byte offset; offset, extent, strides."""
    size = -(-meta.numel // num_parts)
    held = [
        (rank, segment)
        for rank in range(num_ranks)
        for segment in run_segments(meta, *_run(rank % num_parts, size, meta.numel), "")
    ]
    boxes = [segment.box for _, segment in held]
    times = len(numbers)
    return (
        np.repeat(np.array(numbers, np.int64), len(held)),
        np.tile(np.array([rank for rank, _ in held], np.int64), times),
        np.tile(np.array([segment.byte_offset for _, segment in held], np.int64), times),
        np.tile(padded((box.offset for box in boxes), ndim, 0), (times, 1)),
        np.tile(padded((box.extent for box in boxes), ndim, 1), (times, 1)),
        np.tile(padded((segment.strides for _, segment in held), ndim, 0), (times, 1)),
    )


def _run(part: int, size: int, numel: int) -> tuple[int, int]:
    return min(part * size, numel), min((part + 1) * size, numel)
