"""Tables of segment copies and digests on the device, and their kernels.

A table is uploaded, and its kernel loaded, once. A launch then costs the host some ten microseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import PlanError
from weightsync.memory import cuda
from weightsync.memory.digest_factors import COLUMNS, lane_factors, row_factors, word_nbytes
from weightsync.plan import Box
from weightsync.plan.copies import Copies, strided_copies, tiles
from weightsync.plan.layout import padded
from weightsync.plan.transposes import Transposes
from weightsync.protocol.messages import Digests

Int64 = npt.NDArray[np.int64]

NUM_THREADS = 512  # kThreads in kernels.cu
TILE_NBYTES = 32 << 10
SIDES = {1: 128, 2: 128, 4: 64, 8: 64}
"""Rows and columns of a transposed tile, at most, by bytes per element: kSide in kernels.cu."""
_COPY = "copy_tiles"
_TRANSPOSE = "transpose_tiles_"
_DIGEST = "digest"
_FLAG = "flag"
_BLOCKS_PER_PROCESSOR = 2
_DIGESTING_BLOCKS = {"rows": 1, "words": 2}
"""Thread blocks that digest on each multiprocessor, by the shape of tiles."""
_UNIT_NBYTES = 16
_MAX_TENSOR_NBYTES = 64 << 30


class CopyTable:
    """Groups of 2-D copies on the current device, one launch per group, or two if it transposes matrices.

    Copies that together transpose a matrix are found, in the order of `box_copies` and of `Reads`, and made
    tile by tile. Addresses may be in mapped memory of other processes. Copies of one group must not overlap.
    """

    def __init__(self, copies: Copies, bounds: Sequence[int], num_blocks: int | None = None) -> None:
        """
        Args:
            copies: device addresses; copies ``bounds[g]`` to ``bounds[g + 1]`` are group g.
            num_blocks: thread blocks of a launch, which leave room for other work on the device. By default
                each tile has its own, which is faster than to have blocks take several.
        """
        cuda.load(_COPY)
        self._tables = [
            _TileTable(kernel, table, np.searchsorted(number, bounds).tolist())
            for kernel, table, number in copy_tiles(copies, bounds)
        ]
        self._num_blocks = num_blocks

    def launch(self, group: int, stream: torch.cuda.Stream) -> None:
        """Start the copies of group `group` on `stream`, without waiting for them."""
        for table in self._tables:
            table.launch(group, stream, self._num_blocks)


class _TileTable:
    """Groups of tiles on the current device for one kernel."""

    def __init__(self, kernel: str, table: Int64, bounds: Sequence[int]) -> None:
        cuda.load(kernel)
        self._kernel, self._bounds = kernel, bounds
        self._table = _upload(table)
        self._most = len(table) if kernel == _COPY else num_blocks_on_device(_BLOCKS_PER_PROCESSOR)

    def launch(self, group: int, stream: torch.cuda.Stream, num_blocks: int | None) -> None:
        first, end = self._bounds[group], self._bounds[group + 1]
        if first == end:
            return
        args = (np.uint64(self._table[first].data_ptr()), np.int64(end - first))
        num_blocks = min(num_blocks or self._most, end - first)
        cuda.launch(self._kernel, stream, num_blocks, NUM_THREADS, args)


def copy_tiles(copies: Copies, bounds: Sequence[int]) -> Iterator[tuple[str, Int64, Int64]]:
    """Yield kernels and their tiles, int64[m, 6], for groups of copies between `bounds`.

    Each kernel comes with the number of each tile's copy, or the first copy of its matrix: int64[m],
    ascending. Columns are those of `Copies`, for transposed tiles as in `Transposes`. A kernel without tiles
    is left out.
    """
    found = Transposes.find(copies, bounds)
    if len(found.first):
        copies = Copies(*copies.table(found.others).T)
    table, number = tiles(copies, TILE_NBYTES)
    if len(table):
        yield _COPY, table, found.others[number]
    for itemsize in np.unique(found.itemsize).tolist():
        yield f"{_TRANSPOSE}{itemsize}", *found.tiles(itemsize, SIDES[itemsize])


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestPart:
    """`box` of a tensor of `shape`, on the device.

    Attributes:
        tensor: its number among the digests.
        address: the address of the box's first element.
        strides: bytes per dimension of the box.
        itemsize: bytes per element.
        mask: bits of a word that are all set only in NaN and Inf, as in
            `weightsync.memory.nonfinite.word_mask`; 0 looks for none.
    """

    tensor: int
    address: int
    strides: tuple[int, ...]
    box: Box
    shape: tuple[int, ...]
    itemsize: int
    mask: int = 0


class DigestTable:
    """Digests of tensors on the current device, computed in parts as `weightsync.memory.digests` says."""

    def __init__(
        self,
        parts: Sequence[DigestPart],
        num_tensors: int,
        num_blocks: int | None = None,
        totals: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            parts: the parts to read, in any order; those of one tensor must not overlap.
            num_blocks: thread blocks of a kernel; by default as many as the device can hold.
            totals: digests and flags that launches of several tables add to, int64[2, num_tensors]. The
                caller zeroes them. By default each launch starts from zero.
        """
        kind = _FLAG if any(part.mask for part in parts) else _DIGEST
        self._tables = [
            _DigestTiles.of(kind, shape, word, table, num_blocks)
            for (shape, word), table in digest_tiles(parts).items()
        ]
        self._rows = _upload(row_factors(_num_rows(parts)).view(np.int64))
        self._is_alone = totals is None
        self._totals = _upload(np.zeros((2, num_tensors), np.int64)) if totals is None else totals
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start digesting all parts on `stream`, without waiting for the result."""
        if self._is_alone:
            with torch.cuda.stream(stream):
                self._totals.zero_()
        for table in self._tables:
            table.launch(stream, (self._rows, *self._totals))
        self._done.record(stream)

    def result(self) -> Digests:
        """Wait for the last launch; return each tensor's sum over its parts: uint64[num_tensors]."""
        self._done.synchronize()
        totals: Digests = self._totals[0].cpu().numpy().view(np.uint64)
        return totals

    def flagged(self) -> list[int]:
        """Wait for the last launch; return the tensors with flagged words.

        A flagged word has all bits of its part's mask.
        """
        self._done.synchronize()
        flagged: list[int] = self._totals[1].cpu().nonzero().flatten().tolist()
        return flagged


@dataclass(frozen=True, slots=True)
class _DigestTiles:
    """Tiles on the current device for one kernel, and the factors of their words' columns."""

    kernel: str
    tiles: torch.Tensor
    columns: torch.Tensor
    num_blocks: int

    @classmethod
    def of(cls, kind: str, shape: str, word: int, tiles: Int64, num_blocks: int | None) -> _DigestTiles:
        kernel = f"{kind}_{shape}_{word}"
        cuda.load(kernel)
        columns = _upload(lane_factors(word).view(np.int64))
        most = num_blocks or num_blocks_on_device(_DIGESTING_BLOCKS[shape])
        return cls(kernel, _upload(tiles), columns, min(most, len(tiles)))

    def launch(self, stream: torch.cuda.Stream, memory: Iterable[torch.Tensor]) -> None:
        pointers = (np.uint64(each.data_ptr()) for each in (self.columns, *memory))
        args = (np.uint64(self.tiles.data_ptr()), np.int64(len(self.tiles)), *pointers)
        cuda.launch(self.kernel, stream, self.num_blocks, NUM_THREADS, args)


def load_copies() -> None:
    """Load the copy kernel on the current device. Raises TransportError without CuPy."""
    cuda.load(_COPY)


def load_digests(itemsizes: Iterable[int]) -> None:
    """Load the digest kernels for these `itemsizes` on the current device."""
    for word in sorted({word_nbytes(itemsize) for itemsize in itemsizes}):
        for shape in _DIGESTING_BLOCKS:
            cuda.load(f"{_DIGEST}_{shape}_{word}")


def digest_tiles(parts: Sequence[DigestPart]) -> Mapping[tuple[str, int], Int64]:
    """Return the tiles for each kernel, by their shape and the bytes per word: int64[m, 8].

    Tiles of the shape ``rows`` are one row of whole units of 16 bytes. All others are ``words``.

    Columns: address, index, rows, row_nbytes, pitch, index_pitch, tensor, unused. `index` is the number of
    the byte at `address` in the whole tensor, `index_pitch` its growth per row. The upper half of `tensor`
    has the part's mask, repeated to 32 bits.

    Raises:
        PlanError: a tensor has more than 64 GiB: 32 bits cannot count its 16-byte units.
    """
    by_word: dict[int, list[DigestPart]] = defaultdict(list)
    for part in parts:
        if math.prod(part.shape) * part.itemsize > _MAX_TENSOR_NBYTES:
            raise PlanError(f"tensor {part.tensor}", f"shape {part.shape} is more than 64 GiB: no digest")
        by_word[word_nbytes(part.itemsize)].append(part)
    found: dict[tuple[str, int], Int64] = {}
    for word, its in sorted(by_word.items()):
        table = _digest_table(its, word)
        address, index, rows, row_nbytes = table[:, :4].T
        is_row = (rows == 1) & ((address | index | row_nbytes) % _UNIT_NBYTES == 0)
        found |= {("rows", word): table[is_row], ("words", word): table[~is_row]}
    return {kernel: table for kernel, table in found.items() if len(table)}


def _digest_table(parts: Sequence[DigestPart], word: int) -> Int64:
    """Tile parts whose words have `word` bytes, as copies to addresses that number the tensor's bytes."""
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
    cut, copy = tiles(Copies(*copies[kept].T), TILE_NBYTES)
    owner = tensor | sum(mask << shift for shift in range(0, 32, 8 * word)) << 32
    table = np.zeros((len(cut), 8), np.int64)
    table[:, :6], table[:, 6] = cut, owner[box[kept]][copy]
    return table


def _num_rows(parts: Sequence[DigestPart]) -> int:
    """Return the number of rows of 4096 words in the longest tensor."""
    words = (math.prod(part.shape) * part.itemsize // word_nbytes(part.itemsize) for part in parts)
    return -(-max(words, default=0) // COLUMNS)


def _upload(table: Int64) -> torch.Tensor:
    """Copy `table` to the device and wait, so that any stream may use it."""
    return torch.from_numpy(np.ascontiguousarray(table)).cuda()


def num_blocks_on_device(per_processor: int) -> int:
    """Return the thread blocks of the current device if each multiprocessor has `per_processor`."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return per_processor * int(properties.multi_processor_count)
