"""The work list of the digest kernels: runs of rows, cut into tiles."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.errors import PlanError
from weightsync.memory.kernels.digest_factors import COLUMNS, WORD_NBYTES, lane_ones
from weightsync.plan import Box
from weightsync.plan.layout.copies import cut, flattened, strided_copies
from weightsync.plan.layout.layout import Int64, padded

TILE_NBYTES = 32 << 10
UNIT_NBYTES = 16
"""Bytes that a thread loads at once. Rows of whole units are digested and copied the fastest."""
_MAX_TENSOR_NBYTES = 64 << 30
_FEW = 64
"""At most this many parts are processed one by one. The way for many parts takes at least a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPart:
    """`box` of a tensor of `shape`, on the device.

    Attributes:
        tensor: index of the tensor's digest.
        address: the address of the box's first element.
        strides: bytes per dimension of the box.
        itemsize: bytes per element.
        mask: bits of a word that are all set only in NaN and Inf, as in
            `weightsync.memory.kernels.nonfinite.word_mask`; 0 flags no words.
    """

    tensor: int
    address: int
    strides: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    itemsize: int
    mask: int = 0

    @property
    def is_one_run(self) -> bool:
        """Return True if the box is one range of the tensor's bytes, also in memory."""
        if self.box.extent[1:] != self.shape[1:]:
            return False
        nbytes = self.itemsize
        for extent, stride in zip(reversed(self.box.extent), reversed(self.strides), strict=True):
            if extent != 1 and stride != nbytes:
                return False
            nbytes *= extent
        return True


def digest_runs(parts: Sequence[DigestPart]) -> Mapping[int, Int64]:
    """Return the runs for the kernels, by bytes per word: int64[n, 8], not yet cut into tiles.

    Columns: address, index, rows, row_nbytes, pitch, index_pitch, tensor, 0. `index` is the number of
    the byte at `address` in the whole tensor, `index_pitch` the growth of `index` per row. The upper half of
    `tensor` has the part's mask, repeated to 32 bits.

    Raises:
        PlanError: a tensor has more than 64 GiB: 32 bits cannot count its 16-byte units.
    """
    by_word: dict[int, list[DigestPart]] = defaultdict(list)
    straight: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for part in parts:
        if math.prod(part.shape) * part.itemsize > _MAX_TENSOR_NBYTES:
            raise PlanError(f"tensor {part.tensor}", f"shape {part.shape} is more than 64 GiB: no digest")
        word = WORD_NBYTES[part.itemsize]
        if len(parts) <= _FEW and part.is_one_run:
            straight[word].append(_one_run(part, word))
        else:
            by_word[word].append(part)
    found = {word: [np.array(its, np.int64)] for word, its in straight.items()}
    for word, its in by_word.items():
        found.setdefault(word, []).append(_runs(its, word))
    runs = {word: np.concatenate(found[word]) for word in sorted(found)}
    return {word: its[its[:, 3] > 0] for word, its in runs.items() if its[:, 3].any()}


def digest_tiles(runs: Int64) -> Mapping[str, Int64]:
    """Cut runs into tiles, by the tiles' shape: int64[m, 8].

    Tiles of the shape ``rows`` are one row of whole units of 16 bytes. All other tiles are ``words``, also
    the last tile of a run whose other tiles have several rows.
    """
    runs = flattened(runs)
    address, index, rows, row_nbytes, pitch, index_pitch = runs[:, :6].T
    bits = address | index | row_nbytes | np.where(rows > 1, pitch | index_pitch, 0)
    are_rows = (rows == 1) | (row_nbytes > TILE_NBYTES // 2)
    are_rows &= bits % UNIT_NBYTES == 0
    found = {"rows": cut(runs[are_rows], TILE_NBYTES)[0], "words": cut(runs[~are_rows], TILE_NBYTES)[0]}
    return {shape: its for shape, its in found.items() if len(its)}


def num_factor_rows(parts: Sequence[DigestPart]) -> int:
    """Return the number of rows of 4096 words in the longest tensor."""
    words = (math.prod(part.shape) * part.itemsize // WORD_NBYTES[part.itemsize] for part in parts)
    return -(-max(words, default=0) // COLUMNS)


def _one_run(part: DigestPart, word: int) -> tuple[int, ...]:
    """Return the run of a part that is one run."""
    nbytes = math.prod(part.box.extent) * part.itemsize
    first = part.box.offset[0] * math.prod(part.shape[1:]) * part.itemsize if part.shape else 0
    return part.address, first, 1, nbytes, nbytes, nbytes, part.tensor | part.mask * lane_ones(word) << 32, 0


def _runs(parts: Sequence[DigestPart], word: int) -> Int64:
    """Return runs of words of `word` bytes, as copies to addresses that number a tensor's bytes."""
    boxes = [part.box for part in parts]
    ndim = max([1, *(box.ndim for box in boxes)])
    extent = padded((box.extent for box in boxes), ndim, 1)
    shape = padded((part.shape for part in parts), ndim, 1)
    strides = padded((part.strides for part in parts), ndim, 0)
    itemsize, address, tensor, mask = np.array(
        [(part.itemsize, part.address, part.tensor, part.mask) for part in parts], np.int64
    ).T
    numbers = np.ones_like(shape)
    numbers[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    numbers *= itemsize[:, None]
    first = (padded((box.offset for box in boxes), ndim, 0) * numbers).sum(axis=1)
    copies, box = strided_copies(extent, itemsize, address, first, strides, numbers)
    kept = np.flatnonzero((extent[box] > 0).all(axis=1))
    owner = tensor | mask * lane_ones(word) << 32
    table = np.zeros((len(kept), 8), np.int64)
    table[:, :6], table[:, 6] = copies[kept], owner[box[kept]]
    return table
