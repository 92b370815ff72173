"""The factors for rows, words and lanes in a digest; see `weightsync.memory.kernels.digests`.

A lane is 4 bytes of one row: one, two or four words.
"""

from __future__ import annotations

import functools

import numpy as np

from weightsync.protocol.messages import Digests

COLUMNS = 4096
"""Words per row."""
LANE_NBYTES = 4
WORD_NBYTES = {1: 1, 2: 2, 4: 4, 8: 4, 16: 4}
"""Bytes per digested word, by bytes per element."""
WORD_KINDS = {1: 1, 2: 2, 4: 3}
LANE_KINDS = {1: 4, 2: 5}
"""How a part in host memory is digested, by bytes per word: as words or, if aligned, as lanes."""
GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's step: 2**64 over the golden ratio."""


def splitmix64(state: Digests) -> Digests:
    """Return pseudo-random numbers for states: uint64, of the same shape."""
    with np.errstate(over="ignore"):
        z = state * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Digests = z ^ (z >> np.uint64(31))
        return mixed


@functools.cache
def lane_factors(word: int) -> Digests:
    """Return the factor of each lane of a row, for `word` bytes per word: uint64[1024 * word]."""
    # Counted down from the top, so that no row has the same state.
    states = np.uint64(2**64 - 1) - np.arange(COLUMNS * word // LANE_NBYTES, dtype=np.uint64)
    odd: Digests = splitmix64(states) | np.uint64(1)
    return odd


@functools.cache
def column_factors(word: int) -> Digests:
    """Return the factor of each word of a row, for `word` bytes per word: uint64[4096].

    A word's factor is the lane's factor times 1, 2**16 (2-byte words) or powers of 2**8 (bytes). So the sum
    over a lane's words is the lane's factor times the 4 bytes, taken as one number, plus `lane_ones`.
    """
    shifts = np.arange(0, 8 * LANE_NBYTES, 8 * word, dtype=np.uint64)
    factors: Digests = (lane_factors(word)[:, None] << shifts).reshape(-1)
    return factors


@functools.cache
def lane_ones(word: int) -> int:
    """Return a lane whose words, of `word` bytes, are all 1."""
    return sum(1 << shift for shift in range(0, 8 * LANE_NBYTES, 8 * word))


def row_factors(num_rows: int) -> Digests:
    """Return the factors of the first `num_rows` rows: uint64[num_rows]."""
    odd: Digests = splitmix64(np.arange(1, num_rows + 1, dtype=np.uint64)) | np.uint64(1)
    return odd
