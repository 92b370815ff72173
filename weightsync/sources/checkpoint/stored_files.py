"""Bytes of safetensors files: as they are stored, or of float8 weights with their scales multiplied in.

Headers are checked by commands that load no torch, so that it is imported where bytes are read.
"""

from __future__ import annotations

import bisect
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.errors import ConfigError, SourceChangedError
from weightsync.plan import TensorMeta

if TYPE_CHECKING:
    import torch

_MEMORY = "/dev/shm"
_TICK_S = 0.01
"""The longest tick of the clock from which Linux takes times of files. Writes in one tick get the same."""
DEQUANTISED = "bfloat16"
"""The dtype of float8 weights times their scales."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is read as it is stored, if nothing has changed it since `check`.

    Attributes:
        device, inode, nbytes: which file `path` named, and the size of that file.
        written_ns, changed_ns: the time of the last write, and of the last change, which nobody can set.
    """

    path: Path
    device: int
    inode: int
    nbytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def check(cls, path: Path) -> StoredFile:
        """Note which file is at `path`. Any later write changes the times of the file.

        Raises ConfigError unless it is a regular file that can be read.
        """
        fd = _open_regular(path)
        try:
            found = cls._of(path, fd)
        finally:
            os.close(fd)
        if abs(time.time_ns() - found.changed_ns) < _TICK_S * 1e9:
            time.sleep(_TICK_S)
        return found

    @property
    def in_memory(self) -> bool:
        """Return True if the file can be mapped instead of read: it is on the file system of ``/dev/shm``."""
        return os.path.isdir(_MEMORY) and self.device == os.stat(_MEMORY).st_dev

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for the body. Raises SourceChangedError if it changed before the body ended."""
        try:
            fd = _open(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._changed from error
        try:
            self.require_unchanged(fd)
            yield fd
            self.require_unchanged(fd)
        finally:
            os.close(fd)

    def require_unchanged(self, fd: int) -> None:
        """Raise SourceChangedError if the file of descriptor `fd` is another one, or has changed."""
        if self._of(self.path, fd) != self:
            raise self._changed

    def require_unwritten(self, fd: int) -> None:
        """Raise SourceChangedError if the file of descriptor `fd` was written. It may be at no path now."""
        found = self._of(self.path, fd)
        if (found.nbytes, found.written_ns) != (self.nbytes, self.written_ns):
            raise self._changed

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8[n] on the host, from byte `start` on. Raises SourceChangedError."""
        memory = memoryview(target.numpy().data)
        with self.opened() as fd:
            while memory:
                count = os.preadv(fd, [memory], start)
                if not count:
                    raise self._changed
                memory, start = memory[count:], start + count

    @classmethod
    def _of(cls, path: Path, fd: int) -> StoredFile:
        now = os.fstat(fd)
        return cls(path, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)

    @property
    def _changed(self) -> SourceChangedError:
        return SourceChangedError(0, (), (str(self.path),))


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if `path` is anything else."""
    with open(_open_regular(path), "rb") as file:
        try:
            found = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ConfigError("files", str(path), f"it is no JSON: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError("files", str(path), "it is no JSON object: download it again")
    return found


def _open_regular(path: Path) -> int:
    """Return a descriptor. Raises ConfigError for what is no file: reading a FIFO would wait forever."""
    try:
        fd = _open(path)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", error)
        raise ConfigError("files", str(path), f"it cannot be opened: {cause}") from error
    if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
        os.close(fd)
        kind = "folder" if stat.S_ISDIR(mode) else "FIFO" if stat.S_ISFIFO(mode) else "device"
        raise ConfigError("files", str(path), f"it is a {kind}: give a file")
    return fd


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """A tensor of a file, and its first byte there."""

    meta: TensorMeta
    file: StoredFile
    start: int

    def read(self, first: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return `numel` of its elements, by default all, in one dimension, from element `first` on."""
        import torch

        itemsize = self.meta.itemsize
        count = self.meta.numel if numel is None else numel
        data = torch.empty(count * itemsize, dtype=torch.uint8)
        self.file.read_into(data, self.start + first * itemsize)
        return data.view(getattr(torch, self.meta.dtype))


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A float8 matrix [rows, columns], and where the scales of its blocks are.

    Attributes:
        block: rows and columns that share a scale.
    """

    values: StoredPlace
    scales: StoredPlace
    block: tuple[int, int]

    @property
    def meta(self) -> TensorMeta:
        """The matrix in bfloat16."""
        return TensorMeta(self.values.meta.name, DEQUANTISED, self.values.meta.shape)

    def dequantised(self, first: int, numel: int) -> torch.Tensor:
        """Return bfloat16[numel]: elements from `first` on, in row-major order, times their scales."""
        import torch

        columns = self.values.meta.shape[1]
        rows = range(first // columns, -(-(first + numel) // columns))
        grid = self.scales.read().float().view(-1, -(-columns // self.block[1]))
        of_row = torch.arange(rows.start, rows.stop) // self.block[0]
        scales = grid[of_row].repeat_interleave(self.block[1], 1)[:, :columns].flatten()
        begin = first - rows.start * columns
        product = self.values.read(first, numel).float() * scales[begin : begin + numel]
        return product.to(getattr(torch, DEQUANTISED))


class DequantisedFile:
    """The float8 weights of a file, as if it held them one after another in bfloat16."""

    def __init__(self, path: Path, weights: Sequence[ScaledWeight]) -> None:
        self.path, self._weights = path, weights
        sizes = [weight.meta.nbytes for weight in weights]
        self.starts: list[int] = [0, *np.cumsum(sizes[:-1]).tolist()]

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8[n] on the host, from byte `start` on, all of one weight."""
        import torch

        number = bisect.bisect_right(self.starts, start) - 1
        first = (start - self.starts[number]) // 2
        found = self._weights[number].dequantised(first, target.numel() // 2)
        target.copy_(found.view(torch.uint8))
