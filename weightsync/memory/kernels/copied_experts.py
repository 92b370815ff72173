"""Factors by which one digest checks all copies of an expert.

The factors of an expert's copies add up to one modulo 2**64. So if each copy holds the trainers' bytes, the
sum of the copies' digests, multiplied by the factors, is the trainers' digest. A factor is odd, or twice an
odd number, and pseudo-random: equal faults of some copies add up to zero by chance only, once in 2**62.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from weightsync.memory.kernels.digest_factors import splitmix64
from weightsync.plan import RankLayout, Segment
from weightsync.protocol.messages import Digests

_MODULUS = 1 << 64


@functools.cache
def copy_factors(num_copies: int) -> tuple[int, ...]:
    """Return the factor of each copy."""
    states = np.arange(1, num_copies, dtype=np.uint64) + np.uint64((1 << 59) + (num_copies << 32))
    drawn = [int(each) | 1 for each in splitmix64(states)]
    first = (1 - sum(drawn)) % _MODULUS
    if first % 4 == 0:  # else a fault in few high bits might be lost
        drawn[0] = (drawn[0] + 2) % _MODULUS
        first = (first - 2) % _MODULUS
    return (first, *drawn)


def by_factor(
    segments: Sequence[Sequence[Segment]], layout: RankLayout
) -> Mapping[int, Sequence[Sequence[Segment]]]:
    """Return a rank's segments by the factor of their digests. `segments` has those of each tensor."""
    if not layout.arrangement or not layout.arrangement.copies:
        return {1: segments}
    pairs = zip(layout.segments, layout.arrangement.copies, strict=True)
    factors = {segment: copy_factors(count)[copy] for segment, (copy, count) in pairs}
    found = sorted({1, *factors.values()})
    return {each: [[s for s in held if factors[s] == each] for held in segments] for each in found}


def added(digests: Mapping[int, Digests]) -> Digests:
    """Return the sum of digests, multiplied by their factors."""
    total: Digests = np.sum([found * np.uint64(factor) for factor, found in digests.items()], axis=0)
    return total
