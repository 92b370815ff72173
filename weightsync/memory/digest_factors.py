"""The factors for rows and words in a digest; see `weightsync.memory.digests`."""

from __future__ import annotations

import functools

import numpy as np

from weightsync.protocol.messages import Digests

COLUMNS = 4096
"""Words per row."""
GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's step: 2**64 over the golden ratio."""


def word_nbytes(itemsize: int) -> int:
    """Return the bytes per word in which elements of `itemsize` bytes are digested."""
    return min(itemsize, 4)


def _splitmix64(state: Digests) -> Digests:
    with np.errstate(over="ignore"):
        z = state * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Digests = z ^ (z >> np.uint64(31))
        return mixed


@functools.cache
def column_factors() -> Digests:
    """Return the factor of each word of a row: uint64[4096]."""
    # Counted down from the top, so that no row has the same state.
    states = np.uint64(2**64 - 1) - np.arange(COLUMNS, dtype=np.uint64)
    odd: Digests = _splitmix64(states) | np.uint64(1)
    return odd


def row_factors(num_rows: int) -> Digests:
    """Return the factors of the first `num_rows` rows: uint64[num_rows]."""
    odd: Digests = _splitmix64(np.arange(1, num_rows + 1, dtype=np.uint64)) | np.uint64(1)
    return odd
