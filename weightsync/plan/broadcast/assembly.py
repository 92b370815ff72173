"""Where whole tensors are put together from buckets, in memory that later ones use again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from weightsync.plan.broadcast.plan import Plan

_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Assembly:
    """Places for tensors of a plan, used from the bucket of the first piece to the bucket of the last piece.

    Attributes:
        offset: the first byte of each tensor of the plan, a multiple of 256; 0 for tensors without a place.
        complete: for each bucket, the tensors that it completes. Empty tensors are left out.
        nbytes: the bytes that all places take together, a multiple of 256.
    """

    offset: tuple[int, ...]
    complete: tuple[tuple[int, ...], ...]
    nbytes: int


def assemble(plan: Plan, tensors: Collection[int]) -> Assembly:
    """Place `tensors` without overlap while a tensor is incomplete or its last bucket is being read."""
    last: dict[int, int] = {}
    for bucket in plan.buckets():
        last.update((piece.tensor, bucket.index) for piece in bucket.pieces)
    complete: defaultdict[int, list[int]] = defaultdict(list)
    offset, taken, nbytes = [0] * len(plan.tensors), dict[int, tuple[int, int]](), 0
    for bucket in plan.buckets():
        for tensor in dict.fromkeys(piece.tensor for piece in bucket.pieces if piece.tensor in tensors):
            if tensor not in taken:
                start = _gap(sorted(taken.values()), plan.tensors[tensor].nbytes)
                end = start + plan.tensors[tensor].nbytes
                offset[tensor], taken[tensor], nbytes = start, (start, end), max(nbytes, end)
        complete[bucket.index] = [tensor for tensor in taken if last[tensor] == bucket.index]
        for tensor in complete[bucket.index]:
            del taken[tensor]
    found = tuple(tuple(complete[index]) for index in range(plan.num_buckets))
    return Assembly(tuple(offset), found, _aligned(nbytes))


def _gap(taken: list[tuple[int, int]], nbytes: int) -> int:
    """Return the first aligned byte from which `nbytes` are in none of the ascending ranges `taken`."""
    start = 0
    for first, end in taken:
        if start + nbytes <= first:
            break
        start = max(start, _aligned(end))
    return start


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
