"""Changes of memory on the host, found and applied by the current GPU: byte for byte as `changes` does it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.deltas.changes import Span, Table
from weightsync.deltas.device_tiles import MOST_INDEX_NBYTES, DeviceTiles, Found, tile_rows, upload
from weightsync.deltas.tiles import TILE, Bytes, Code, Int64
from weightsync.errors import WireError
from weightsync.memory import cuda

CHUNK_NBYTES = 16 << 20
"""Bytes that are copied to the GPU at a time: enough for the full rate of a copy."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some tiles, and the first byte and the number of bytes of their memory."""

    tiles: slice
    first: int
    nbytes: int


class _Turn:
    """Memory of the GPU for a chunk of two versions, and for the changes."""

    def __init__(self, nbytes: int) -> None:
        self.tiles = DeviceTiles(nbytes // TILE, nbytes)
        self._sides = [torch.empty_like(self.tiles.values) for _ in range(2)]

    def load(self, chunk: _Chunk, *versions: torch.Tensor) -> list[int]:
        """Start to copy a chunk of each version. Returns the addresses for offset 0 of the versions."""
        for side, version in zip(self._sides, versions, strict=False):
            self._copy(side, version[chunk.first : chunk.first + chunk.nbytes])
        return [side.data_ptr() - chunk.first for side in self._sides]

    def load_changes(self, data: torch.Tensor, begins: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Start to copy a chunk's indexes and values. Returns the addresses for offset 0 of `data`."""
        held = self.tiles.index, self.tiles.values
        for to, begin, end in zip(held, begins, ends, strict=True):
            self._copy(to, data[begin:end])
        return [to.data_ptr() - begin for to, begin in zip(held, begins, strict=True)]

    def save(self, number: int, chunk: _Chunk, to: torch.Tensor) -> None:
        """Start to copy back the chunk of version `number`, as numbered by `load`."""
        self._copy(to[chunk.first :], self._sides[number][: chunk.nbytes])

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        cuda.copy(to.data_ptr(), source.data_ptr(), len(source), self.tiles.stream)


class CodingMemory:
    """Memory of the current GPU that `DeviceCoder` uses. Coders may share it.

    There are two of everything: a chunk is copied while the GPU works on the one before.
    """

    def __init__(self, nbytes: int = CHUNK_NBYTES) -> None:
        """`nbytes`: of a chunk. Raises TransportError without CuPy, and OutOfMemoryError."""
        self.nbytes, self.turns = nbytes, (_Turn(nbytes), _Turn(nbytes))
        self.lock = threading.Lock()  # a call that the driver gave up may still run


class DeviceChanges:
    """Changes in memory of the host, chunk by chunk. Written as `Changes`."""

    def __init__(self, chunks: Sequence[Found]) -> None:
        self._chunks = chunks
        self._num = sum(len(chunk.table[0]) for chunk in chunks)

    @property
    def nbytes(self) -> int:
        """The bytes that `write` writes."""
        return 9 * self._num + sum(len(chunk.index) + len(chunk.values) for chunk in self._chunks)

    def write(self, to: Bytes) -> None:
        """Write everything to `to`, uint8[nbytes]."""
        if self._chunks:
            table, rows = Table.of(to, self._num), np.concatenate([each.table for each in self._chunks], 1)
            table.codes[:], table.counts[:], table.sizes[:] = rows
        at = 9 * self._num
        for data in [*(chunk.index for chunk in self._chunks), *(chunk.values for chunk in self._chunks)]:
            to[at : at + len(data)] = data
            at += len(data)


class DeviceCoder:
    """Finds and applies the changes of some spans of memory of the host, which should be page-locked."""

    def __init__(self, spans: Sequence[Span], memory: CodingMemory) -> None:
        """`spans` ascend. Raises OutOfMemoryError."""
        self._rows, self._memory = tile_rows(spans), memory
        self._chunks = [*_chunks(self._rows, memory.nbytes)]
        self._tiles = upload(self._rows)
        self._table = torch.empty((5, len(self._rows)), dtype=torch.int64, device=self._tiles.device)

    def between(self, old: torch.Tensor, new: torch.Tensor, to: torch.Tensor | None = None) -> DeviceChanges:
        """Compare two versions of the memory, and copy the new version to `to`.

        All are uint8, one dimension. Ignores bytes outside of the spans.
        """
        found: list[Found] = []
        with self._memory.lock:
            before: DeviceTiles | None = None
            for turn, chunk in self._in_turn():
                turn.tiles.find(self._tiles[chunk.tiles], *turn.load(chunk, old, new))
                if to is not None:
                    turn.save(1, chunk, to)
                if before:
                    found.append(before.found())
                before = turn.tiles
            if before:
                found.append(before.found())
        return DeviceChanges(found)

    def rebuild(self, data: torch.Tensor, base: torch.Tensor, to: torch.Tensor) -> None:
        """Apply the delta `data` to `base`, and write the result to `to`: all uint8, one dimension.

        Bytes outside of the spans are undefined. Raises WireError if the delta is damaged. Some of `to` may
        have been written then.
        """
        with self._memory.lock:
            begins, ends = self._load(data)
            for turn, chunk in self._in_turn():
                address, _ = turn.load(chunk, base)
                first, last = chunk.tiles.start, chunk.tiles.stop - 1
                changes = turn.load_changes(data, begins[:, first].tolist(), ends[:, last].tolist())
                turn.tiles.apply(self._tiles[chunk.tiles], self._table[:, chunk.tiles], address, *changes)
                turn.save(0, chunk, to)
            damaged = [turn.tiles.damaged() for turn in self._memory.turns]
        for code in damaged:
            if code is not None:
                raise _damage(code)

    def _load(self, data: torch.Tensor) -> tuple[Int64, Int64]:
        """Copy the table of a delta to the device.

        Returns where each tile's index and values begin, and where they end: both int64[2, n].
        """
        sent, (_, nums, widths) = data.numpy(), self._rows.T
        table = Table.of(sent, len(widths))
        ends = np.stack(table.ends(widths, len(sent)))
        too_long = table.codes[(table.sizes > MOST_INDEX_NBYTES) | (table.counts > nums)]
        if len(too_long):
            raise _damage(Code(too_long[0]))
        begins: Int64 = ends - np.stack([table.sizes, table.counts * widths])
        rows = np.stack([table.codes, table.counts, table.sizes, *begins]).astype(np.int64)
        self._table.copy_(torch.from_numpy(rows))
        return begins, ends

    def _in_turn(self) -> Iterator[tuple[_Turn, _Chunk]]:
        for number, chunk in enumerate(self._chunks):
            yield self._memory.turns[number % 2], chunk


def _chunks(tiles: Int64, most: int) -> Iterator[_Chunk]:
    """Yield neighbouring tiles: at most `most` bytes of memory, and a tile for each `TILE` bytes."""
    begin, ends = 0, tiles[:, 0] + tiles[:, 1] * tiles[:, 2]
    while begin < len(tiles):
        first = int(tiles[begin, 0])
        end = min(int(np.searchsorted(ends, first + most, side="right")), begin + most // TILE)
        end = max(end, begin + 1)
        yield _Chunk(slice(begin, end), first, int(ends[end - 1]) - first)
        begin = end


def _damage(code: Code) -> WireError:
    return WireError(f"a tile of code {code.name} is damaged: places are out of order or range")
