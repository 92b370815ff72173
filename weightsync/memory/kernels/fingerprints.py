"""Fingerprints: three words that stand for a table of digests, and add up as its shares do.

With the digest ``d[i]`` of tensor i::

    fingerprint[k] = sum over i of  factor[k, i] * d[i]   modulo 2**64,  k = 0, 1, 2

`factor[0]` is all ones; the others are odd pseudo-random 64-bit numbers. Shares of a table have fingerprints
that add up to the whole table's, so that a driver compares ranks without their tables.

Tables that differ in one tensor never have the same fingerprint, since their plain sums differ. If they
differ in more, chance makes them equal at most once in ``2**(2 * (63 - z))``, where ``2**z`` is the largest
power of two that divides all the differences.

Source: multilinear hashing, as in `weightsync.memory.kernels.digests`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from weightsync.memory.kernels.digest_factors import splitmix64
from weightsync.plan.layout.layout import Int64
from weightsync.plan.layout.replicas import Claims
from weightsync.protocol.messages import Compared, Digests, Fingerprint, Published, PublishReport
from weightsync.protocol.timing import Span


def fingerprint(digests: Digests, only: Sequence[int] | None = None) -> Fingerprint:
    """Return the fingerprint of a table, uint64[..., 3] for digests uint64[..., num_tensors].

    Tensors that are not in `only`, if it is given, count as zero.
    """
    factors = _factors(digests.shape[-1])
    if only is not None:
        chosen = np.array(only, np.intp)
        factors, digests = factors[:, chosen], digests[..., chosen]
    found: Fingerprint = np.einsum("...i,ki->...k", digests, factors)
    return found


def publish_report(
    published: Published, frozen: Sequence[int], spans: Sequence[Span], compared: Compared | None = None
) -> PublishReport:
    """Return what the driver gets of a version. `frozen` are the numbers of the plan's frozen tensors."""
    digests, agreement = published.digests, compared.agreement if compared else None
    found = fingerprint(digests), fingerprint(digests, frozen)
    return PublishReport(*found, published.nonfinite, spans, agreement, published.written)


def agreement_factors(claims: Claims, num_tensors: int) -> Digests:
    """Return the factors of a rank's digests of `claims`: uint64[3, n]. Their products' sums are added up.

    Of the ranks that hold a box, all but one have an odd pseudo-random factor, and that one the negative sum
    of these: equal digests add up to zero. It is another rank in each row. So a digest that differs on one
    rank always shows, and digests that differ on more of them but for chance, as with fingerprints.
    """
    return np.stack(
        [
            factors[claims.tensor] * _balanced(row, claims.place, claims.count)
            for row, factors in enumerate(_factors(num_tensors))
        ]
    )


def _balanced(row: int, place: Int64, count: Int64) -> Digests:
    """Return numbers that add up to zero over the places 0 to `count`, odd ones at all places but one."""
    places = np.arange(int(count.max(initial=1)), dtype=np.uint64)
    drawn = splitmix64(np.uint64((1 << 60) + (row << 40)) + places) | np.uint64(1)
    last = row % count
    total = np.cumsum(drawn, dtype=np.uint64)[count - 1]
    return np.where(place == last, drawn[last] - total, drawn[place])


@functools.lru_cache(maxsize=4)
def _factors(num_tensors: int) -> Digests:
    """Return the factors of a table's tensors: uint64[3, num_tensors]."""
    numbers = np.arange(num_tensors, dtype=np.uint64)
    # From states that no row, lane or word of a digest has.
    drawn = [splitmix64(np.uint64(1 << bit) + numbers) | np.uint64(1) for bit in (61, 62)]
    return np.stack([np.ones_like(numbers), *drawn])
