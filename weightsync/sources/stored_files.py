"""Bytes of safetensors files: as they are stored, or of float8 weights with their scales multiplied in.

Headers are checked by commands that load no torch, so that it is imported where bytes are read.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta

if TYPE_CHECKING:
    import torch

_MEMORY = "/dev/shm"
DEQUANTISED = "bfloat16"
"""The dtype of float8 weights times their scales."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is read as it is stored."""

    path: Path

    @property
    def in_memory(self) -> bool:
        """Whether it can be mapped in place of being read: it is on the file system of ``/dev/shm``."""
        return os.path.isdir(_MEMORY) and self.path.stat().st_dev == os.stat(_MEMORY).st_dev

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill `target`, uint8[n] on the host, from byte `start` on. Raises ConfigError if the file ends."""
        memory = memoryview(target.numpy().data)
        with self.path.open("rb", buffering=0) as file:
            while memory:
                count = os.preadv(file.fileno(), [memory], start)
                if not count:
                    raise ConfigError(
                        "files", str(self.path), "it was truncated while it was read: download it again"
                    )
                memory, start = memory[count:], start + count


@dataclass(frozen=True, slots=True)
class Place:
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

    values: Place
    scales: Place
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

    in_memory = False

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
