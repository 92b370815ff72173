"""Codes of changed elements on the current GPU: the same codes as `tiles` finds, for many tiles at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.deltas.changes import Span
from weightsync.deltas.tiles import TILE, Bytes, Code, Int64, cut
from weightsync.memory import cuda

MOST_INDEX_NBYTES = TILE // 8
"""No index is longer than a bitmap."""
_NUM_THREADS = 512  # kThreads in kernels.cu
DEVICE = "cuda"
"""The torch device of all memory here."""


def tile_rows(spans: Sequence[Span]) -> Int64:
    """Return the offset, the number of elements and the bytes per element of each tile: int64[n, 3]."""
    rows = [
        (span.offset + part.start, (part.stop - part.start) // span.itemsize, span.itemsize)
        for span in spans
        for part in cut(span.nbytes, span.itemsize)
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def upload(rows: Int64) -> torch.Tensor:
    """Copy `tile_rows` to the current device, as the kernels read them."""
    packed = np.stack([rows[:, 0], rows[:, 1] | rows[:, 2] << 32], 1)
    return torch.from_numpy(packed).to(DEVICE)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Changes of some tiles, in memory of the host.

    Attributes:
        table: the codes, the numbers of values and the bytes of indexes: int64[3, n].
        index, values: of all tiles, in order: uint8, one dimension.
    """

    table: Int64
    index: Bytes
    values: Bytes


class DeviceTiles:
    """Memory of the current device for the changes of some tiles, and the kernels that find and apply them.

    Attributes:
        stream: where all work is queued.
        index, values: of all tiles, in order: uint8, one dimension, on the device.
    """

    def __init__(self, num_tiles: int, nbytes: int) -> None:
        """Allocate memory for at most `num_tiles` tiles of at most `nbytes` bytes together.

        Raises TransportError without CuPy, and OutOfMemoryError.
        """
        for name in ("find_changes", "write_changes", "apply_changes"):
            cuda.load(name)
        self.stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.index, self.values = _memory(num_tiles * MOST_INDEX_NBYTES), _memory(nbytes)
        self._bits = _memory(num_tiles * TILE // 8)
        self._found, self._damaged = _memory(6 * num_tiles, torch.int64), _memory(1, torch.int64).zero_()
        self._num = 0
        torch.cuda.current_stream().synchronize()

    def find(self, tiles: torch.Tensor, old: int, new: int) -> None:
        """Start to compare two versions of `tiles`, of `upload`, with their addresses for offset 0."""
        self._num = num = len(tiles)
        with torch.cuda.stream(self.stream):
            found = self._found[: 6 * num].view(6, num)
            versions, bits = (np.uint64(old), np.uint64(new)), _address(self._bits)
            self._launch("find_changes", num, tiles, np.int64(num), *versions, _address(found), bits)
            torch.cumsum(found[2:4], 1, out=found[4:])
            places = _address(found), _address(found[4:]), bits, _address(self.index), _address(self.values)
            self._launch("write_changes", num, tiles, np.int64(num), np.uint64(new), *places)

    def found(self) -> Found:
        """Wait for the last `find`. Returns what it found."""
        with torch.cuda.stream(self.stream):
            rows = self._found[: 6 * self._num].cpu().numpy().reshape(6, -1)
            index_nbytes, values_nbytes = rows[4:, -1].tolist()
            index, values = self.index[:index_nbytes].cpu(), self.values[:values_nbytes].cpu()
        return Found(rows[:3], index.numpy(), values.numpy())

    def apply(self, tiles: torch.Tensor, table: torch.Tensor, memory: int, index: int, values: int) -> None:
        """Start to write values to their places in `tiles`, of `upload`.

        No index may be longer than `MOST_INDEX_NBYTES`, and no tile may have more values than elements.

        Args:
            table: the rows of `Found.table`, and where each tile's index and values begin: int64[5, n].
            memory, index, values: addresses for offset 0.
        """
        places = _address(table), np.uint64(memory), np.uint64(index), np.uint64(values)
        row = np.int64(table.stride(0))
        self._launch("apply_changes", len(tiles), tiles, row, *places, _address(self._damaged))

    def damaged(self) -> Code | None:
        """Wait for all work. Returns the code of a damaged tile that was not applied, if there was one."""
        with torch.cuda.stream(self.stream):
            code = int(self._damaged.item()) - 1
            self._damaged.zero_()
        return None if code < 0 else Code(code)

    def _launch(self, name: str, num: int, tiles: torch.Tensor, *args: object) -> None:
        cuda.launch(name, self.stream, num, _NUM_THREADS, (_address(tiles), *args))


def _memory(num: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(num, dtype=dtype, device=DEVICE)


def _address(tensor: torch.Tensor) -> np.uint64:
    return np.uint64(tensor.data_ptr())
