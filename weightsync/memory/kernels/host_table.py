"""Copies, digests and counts of NaN and Inf for many parts of host tensors in one call."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.memory.host import num_threads
from weightsync.memory.kernels.digest_factors import (
    COLUMNS,
    LANE_KINDS,
    LANE_NBYTES,
    WORD_KINDS,
    WORD_NBYTES,
    column_factors,
    lane_factors,
    lane_ones,
)
from weightsync.memory.kernels.digests import in_lanes, runs
from weightsync.plan import Box
from weightsync.protocol.messages import Digests

_Int64 = npt.NDArray[np.int64]

_PART_COST = 64
"""The fixed cost of a part, as bytes that would take as long."""
_RANGE_COST = 8 << 20
_TARGET = 1
"""The column of a row that has the address to copy to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """`box` of a tensor of `shape`: contiguous, and aligned to the dtype.

    Attributes:
        tensor: index of the tensor's digest; -1 to copy without a digest.
        address: the address of the box's first element.
        itemsize: bytes per element.
        target: the address of the copy, which is made before the digest; 0 for no copy.
        mask: the bits that are all set only in NaN and Inf, of `MASKS`; 0 for none.
    """

    tensor: int
    address: int
    box: Box
    shape: tuple[int, ...]
    itemsize: int
    target: int = 0
    mask: int = 0


class HostTable:
    """Copies parts and digests the originals, as `weightsync.memory.kernels.digests` says.

    The caller owns the memory and keeps it valid during each `run`.

    Attributes:
        ranges: ranges of parts with a few MiB each, which several threads may `run` at once.
        counts: NaN and Inf elements per part in the last `run` that counted: int64[n].
    """

    def __init__(self, parts: Sequence[HostPart], num_tensors: int) -> None:
        """`parts` of one tensor must not overlap. The first table on a machine takes some seconds."""
        self._num_tensors = num_tensors
        self._tensor = np.array([part.tensor for part in parts], np.int64)
        self._shares = np.zeros(len(parts), np.uint64)
        self.counts: _Int64 = np.zeros(len(parts), np.int64)
        rows, starts, num_starts = [], [np.zeros(0, np.int64)], 0
        for part in parts:
            word, nbytes = WORD_NBYTES[part.itemsize], part.box.numel * part.itemsize
            if part.tensor < 0:
                rows.append((part.address, part.target, nbytes, 0, 0, 0, 0, 0, 1))
                continue
            first, run = _ZERO, part.box.numel
            if part.box.extent != part.shape:
                first, run = runs(part.shape, part.box)
            per_element = part.itemsize // word
            first, run, kind = first * per_element, run * per_element, WORD_KINDS[word]
            if word < LANE_NBYTES and in_lanes(first, run, word, part.address):
                first, run, kind = first * word // LANE_NBYTES, run * word // LANE_NBYTES, LANE_KINDS[word]
            starts.append(first)
            end = num_starts + len(first)
            held = part.address, part.target, nbytes
            rows.append((*held, kind, num_starts, end, run, part.mask, part.itemsize))
            num_starts = end
        self._rows = np.array(rows, np.int64).reshape(-1, 9)
        self._starts = np.concatenate(starts)
        cost = np.cumsum(self._rows[:, 2] + _PART_COST) // _RANGE_COST
        cuts = [*np.flatnonzero(np.diff(cost, prepend=-1)).tolist(), len(rows)]
        self.ranges = list(itertools.pairwise(cuts))
        if parts:
            self.run(0, 0)  # compiles the kernel, so that no update pays for it

    def run(self, first: int, end: int, count: bool = False) -> None:
        """Copy and digest parts `first` to `end`. With `count`, also count NaN and Inf."""
        from weightsync.memory.kernels.host_kernels import copy_and_digest

        copy_and_digest(first, end, count, self._rows, self._starts, *_factors(), self._shares, self.counts)

    def run_all(self) -> None:
        """Copy and digest all parts, in several threads if there are several ranges."""
        if len(self.ranges) < 2:
            for first, end in self.ranges:
                self.run(first, end)
            return
        with ThreadPoolExecutor(num_threads(16)) as threads:
            list(threads.map(self.run, *zip(*self.ranges, strict=True)))

    def without_copies(self) -> HostTable:
        """Return a table that digests the same parts without copies."""
        table = copy.copy(self)
        table._rows, table._shares = self._rows.copy(), self._shares.copy()
        table._rows[:, _TARGET] = 0
        return table

    def digests(self) -> Digests:
        """Return the sum over each tensor's parts in the last `run`: uint64[num_tensors]."""
        digests = np.zeros(self._num_tensors, np.uint64)
        has_digest = self._tensor >= 0
        np.add.at(digests, self._tensor[has_digest], self._shares[has_digest])
        return digests


_ZERO: _Int64 = np.zeros(1, np.int64)


@functools.cache
def _factors() -> tuple[Digests, _Int64]:
    """Return by kind the factors, uint64[6, 4096], and the number of factors and ones, int64[6, 2]."""
    factors, sizes = np.zeros((6, COLUMNS), np.uint64), np.zeros((6, 2), np.int64)
    for word, kind in WORD_KINDS.items():
        factors[kind], sizes[kind] = column_factors(word), (COLUMNS, 1)
    for word, kind in LANE_KINDS.items():
        lanes = lane_factors(word)
        factors[kind, : len(lanes)], sizes[kind] = lanes, (len(lanes), lane_ones(word))
    return factors, sizes
