"""Tables of segment copies and digests on the device, and their kernels.

Tables are uploaded, and kernels loaded, once. A launch then costs the host some ten microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.memory.kernels.device_factors import lanes_on_device, rows_on_device
from weightsync.memory.kernels.digest_factors import WORD_NBYTES
from weightsync.memory.kernels.digest_tiles import (
    TILE_NBYTES,
    DigestPart,
    digest_runs,
    digest_tiles,
    num_factor_rows,
)
from weightsync.memory.kernels.read_back import ReadBack
from weightsync.plan.layout.copies import Copies, tiles
from weightsync.plan.layout.layout import Int64
from weightsync.plan.layout.transposes import Transposes
from weightsync.protocol.messages import Digests

NUM_THREADS = 512  # kThreads in kernels.cu
SIDES = {1: 128, 2: 128, 4: 64, 8: 64}
"""Rows and columns of a transposed tile, at most, by bytes per element: kSide in kernels.cu."""
_COPY = "copy_tiles"
_TRANSPOSE = "transpose_tiles_"
_DIGEST = "digest"
_FLAG = "flag"
_WRITE = "write_tiles"
_BLOCKS_PER_PROCESSOR = 2
_DIGESTING_BLOCKS = {"rows": 1, "words": 2}
"""Thread blocks that digest on each multiprocessor, by the shape of tiles."""
_WRITING_BLOCKS = 1


class CopyTable:
    """Groups of 2-D copies on the current device, with one launch per group, or two to transpose too.

    Copies that together transpose a matrix are found, in the order of `box_copies` and of `Reads`, and made
    tile by tile. Addresses may be in mapped memory of other processes. Copies of one group must not overlap.
    """

    def __init__(self, copies: Copies, bounds: Sequence[int], num_blocks: int | None = None) -> None:
        """
        Args:
            copies: device addresses; copies ``bounds[g]`` to ``bounds[g + 1]`` are group g.
            num_blocks: thread blocks of a launch, to leave room for other work on the device. By default
                every tile has a block, which is faster than blocks with several tiles.
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

    The second array has the index of each tile's copy, or of the first copy of a matrix: int64[m], ascending.
    Columns are as in `Copies`, for transposed tiles as in `Transposes`. A kernel without tiles is left out.
    """
    found = Transposes.find(copies, bounds)
    if len(found.first):
        copies = Copies(*copies.table(found.others).T)
    table, number = tiles(copies, TILE_NBYTES)
    if len(table):
        yield _COPY, table, found.others[number]
    for itemsize in np.unique(found.itemsize).tolist():
        yield f"{_TRANSPOSE}{itemsize}", *found.tiles(itemsize, SIDES[itemsize])


class DigestTable:
    """Digests of tensors on the current device, computed in parts: see `kernels.digests`."""

    def __init__(
        self,
        parts: Sequence[DigestPart],
        num_tensors: int,
        num_blocks: int | None = None,
        totals: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            parts: the parts to read, in any order. Parts of one tensor must not overlap.
            num_blocks: thread blocks of a kernel; by default as many as the device can hold.
            totals: digests and flags to which launches of several tables add, int64[2, num_tensors]. The
                caller zeroes `totals`. By default every launch starts from zero.
        """
        kind = _FLAG if any(part.mask for part in parts) else _DIGEST
        self._tables = _tables(kind, digest_runs(parts), num_blocks)
        self._rows = rows_on_device(num_factor_rows(parts))
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
        """Wait for the last launch; return the sum over each tensor's parts: uint64[num_tensors]."""
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


class WrittenDigests:
    """Copies on the current device, with digests of the targets afterwards.

    A block reads back the bytes that it has just written, mostly from the device's L2 cache. A second pass
    would read all bytes from memory. Copies that `ReadBack` does not pair are made first, and then digested.
    """

    def __init__(self, copies: Copies, parts: Sequence[DigestPart], num_tensors: int) -> None:
        """
        Args:
            copies: copies between device addresses, also in other processes' mapped memory, without overlap.
            parts: all parts to digest, also parts that are written elsewhere before a launch.
        """
        runs = digest_runs(parts)
        found: dict[int, ReadBack] = {}
        for word, its in runs.items():
            found[word] = ReadBack.find(copies, its)
            copies = found[word].copies
        self._copies = CopyTable(copies, [0, len(copies)])
        self._tables = [
            _DigestTiles.of(_WRITE, word, its.tiles(), num_blocks_on_device(_WRITING_BLOCKS))
            for word, its in found.items()
            if len(its.pairs)
        ]
        self._tables += _tables(_DIGEST, {word: its.runs for word, its in found.items()})
        self._rows = rows_on_device(num_factor_rows(parts))
        self._totals = _upload(np.zeros((2, num_tensors), np.int64))

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start all copies and digests on `stream`, without waiting for them."""
        with torch.cuda.stream(stream):
            self._totals.zero_()
        self._copies.launch(0, stream)
        for table in self._tables:
            table.launch(stream, (self._rows, *self._totals))

    def result(self) -> Digests:
        """Return the sum over each tensor's parts: uint64[num_tensors]. Wait for `stream` first."""
        totals: Digests = self._totals[0].cpu().numpy().view(np.uint64)
        return totals


@dataclass(frozen=True, slots=True)
class _DigestTiles:
    """Tiles on the current device for one kernel, with the factors of words' columns."""

    kernel: str
    tiles: torch.Tensor
    columns: torch.Tensor
    num_blocks: int

    @classmethod
    def of(cls, kind: str, word: int, tiles: Int64, num_blocks: int) -> _DigestTiles:
        kernel = f"{kind}_{word}"
        cuda.load(kernel)
        return cls(kernel, _upload(tiles), lanes_on_device(word), min(num_blocks, len(tiles)))

    def launch(self, stream: torch.cuda.Stream, memory: Iterable[torch.Tensor]) -> None:
        pointers = (np.uint64(each.data_ptr()) for each in (self.columns, *memory))
        args = (np.uint64(self.tiles.data_ptr()), np.int64(len(self.tiles)), *pointers)
        cuda.launch(self.kernel, stream, self.num_blocks, NUM_THREADS, args)


def _tables(kind: str, runs: Mapping[int, Int64], num_blocks: int | None = None) -> list[_DigestTiles]:
    """Cut runs into tiles, for the kernels of one kind."""
    return [
        _DigestTiles.of(
            f"{kind}_{shape}", word, table, num_blocks or num_blocks_on_device(_DIGESTING_BLOCKS[shape])
        )
        for word, its in runs.items()
        for shape, table in digest_tiles(its).items()
    ]


def load_copies() -> None:
    """Load the copy kernel on the current device. Raises TransportError without CuPy."""
    cuda.load(_COPY)


def load_for_16_bits() -> None:
    """Load the kernels for weights of 16 bits. Raises TransportError without CuPy.

    CuPy then stores them on disk for the host's other processes: compiling takes 0.2 s per kernel.
    """
    cuda.load(f"{_WRITE}_2")
    load_digests([2])
    load_digests([2], flags=True)


def load_digests(itemsizes: Iterable[int], flags: bool = False) -> None:
    """Load the digest kernels for `itemsizes` on the current device. With `flags`, they also flag words."""
    for word in sorted({WORD_NBYTES[itemsize] for itemsize in itemsizes}):
        for shape in _DIGESTING_BLOCKS:
            cuda.load(f"{_FLAG if flags else _DIGEST}_{shape}_{word}")


def _upload(table: Int64) -> torch.Tensor:
    """Copy `table` to the device and wait, so that any stream may use it."""
    return torch.from_numpy(np.ascontiguousarray(table)).cuda()


def num_blocks_on_device(per_processor: int) -> int:
    """Return the thread blocks of the current device if each multiprocessor has `per_processor`."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return per_processor * int(properties.multi_processor_count)
