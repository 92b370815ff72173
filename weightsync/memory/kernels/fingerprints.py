"""Fingerprints: three words that stand for a table of digests. Shares' fingerprints add up.

With the digest ``d[i]`` of tensor i::

    fingerprint[k] = sum over i of  factor[k, i] * d[i]   modulo 2**64,  k = 0, 1, 2

`factor[0]` is all ones; the other factors are odd pseudo-random 64-bit numbers. The fingerprints of a table's
shares add up to the table's fingerprint, so that a driver compares ranks without tables.

Tables that differ in one tensor never have the same fingerprint, since the plain sums differ. If tables
differ in more tensors, chance makes fingerprints equal at most once in ``2**(2 * (63 - z))``, where ``2**z``
is the largest power of two that divides all the differences.

Source: multilinear hashing, as in `weightsync.memory.kernels.digests`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from weightsync.memory.kernels.digest_factors import splitmix64
from weightsync.plan.layout.layout import Int64
from weightsync.plan.layout.replicas import SharedBoxes
from weightsync.protocol.messages import Compared, Digests, Fingerprint, Published, PublishReport, Sample
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
    published: Published,
    frozen: Sequence[int],
    spans: Sequence[Span],
    compared: Compared | None = None,
    changed: Mapping[str, Sample] | None = None,
) -> PublishReport:
    """Return the driver's report of a version. `frozen` has the indices of the plan's frozen tensors."""
    digests, agreement = published.digests, compared.agreement if compared else None
    found = fingerprint(digests), fingerprint(digests, frozen)
    return PublishReport(*found, published.nonfinite, spans, agreement, published.written, changed or {})


def agreement_factors(claims: SharedBoxes, num_tensors: int) -> Digests:
    """Return the factors of a rank's digests of `claims`: uint64[3, n]. The driver adds up the products.

    Of the ranks that hold a box, one rank has the negative sum of the other ranks' factors, which are odd and
    pseudo-random: equal digests add up to zero. In each row, another rank has the negative sum. So a digest
    that differs on one rank is always found. Digests that differ on several ranks are found except by chance,
    as with fingerprints.
    """
    return np.stack(
        [
            factors[claims.tensor] * _balanced(row, claims.place, claims.count)
            for row, factors in enumerate(_factors(num_tensors))
        ]
    )


def _balanced(row: int, place: Int64, count: Int64) -> Digests:
    """Return numbers that add up to zero over the places 0 to `count`, odd except at one place."""
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
