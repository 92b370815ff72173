"""Quantises matrices that share one scale, on a GPU, and digests sources and results.

One kernel finds the greatest magnitudes, another kernel makes values and scales. Both read every element
once. If a trainer writes an element in between, a scale may not fit the values. Digests do not show this, but
`changed` does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.memory.kernels.device_factors import lanes_on_device, rows_on_device
from weightsync.memory.kernels.device_kernels import num_blocks_on_device
from weightsync.memory.kernels.digest_factors import COLUMNS
from weightsync.plan.layout.formats import TOGETHER, Format
from weightsync.quantising.quantize_kernels import QuantizedMatrix, has_kernel

_NUM_THREADS = 256  # kQuantizers in kernels.cu
_FINDERS, _MAKERS = 4, 3  # blocks per processor, as registers allow
_PIECE_NBYTES = 32 << 10  # as much as fits in the registers of a block
_LEAST_COLUMNS = 512


def can_share_scale(weight: torch.Tensor, form: Format) -> bool:
    """Return True if `SharedScaleTable` accepts a matrix: on a GPU with float8, of one block."""
    return form.rule in TOGETHER and math.prod(form.grid(weight.shape)) == 1 and has_kernel(weight, form)


class SharedScaleTable:
    """Matrices on the current device, in groups with one scale."""

    def __init__(
        self, groups: Sequence[Sequence[QuantizedMatrix]], sources: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """
        Args:
            groups: matrices of one block. All matrices of a group have the same scale address.
            sources: int64 digests of the sources, to which launches add. The caller zeroes the digests.
            stored: digests of the results, likewise.
        """
        by_kernel = defaultdict[str, list[tuple[QuantizedMatrix, int]]](list)
        for group, its in enumerate(groups):
            for matrix in its:
                by_kernel[matrix.kernel].append((matrix, group))
        self._tables = [_Table.of(kernel, its) for kernel, its in by_kernel.items()]
        # By the first kernel, and by the second.
        self._largest = torch.zeros((2, len(groups)), dtype=torch.int32, device=sources.device)
        num_words = max((each.num_words for its in groups for each in its), default=0)
        self._digests = rows_on_device(-(-num_words // COLUMNS)), sources, stored

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start the kernels on `stream`."""
        with torch.cuda.stream(stream):
            self._largest.zero_()
        for table in self._tables:
            table.launch(table.finder, _FINDERS, stream, (self._largest[0],))
        for table in self._tables:
            memory = *self._largest, *table.factors, *self._digests
            table.launch(table.maker, _MAKERS, stream, memory)

    def changed(self) -> list[int]:
        """Return the indices of groups that changed between the two kernels. Both must have ended."""
        first, second = self._largest.cpu()
        return torch.nonzero(first != second).flatten().tolist()


@dataclass(frozen=True, slots=True)
class _Table:
    """Matrices for one pair of kernels: int64[n, 16], `Matrix` in kernels.cu, and int32[n] groups."""

    finder: str
    maker: str
    rows: torch.Tensor
    groups: torch.Tensor
    num_blocks: int
    factors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, maker: str, matrices: Sequence[tuple[QuantizedMatrix, int]]) -> _Table:
        finder = maker.replace("values", "largest")
        for kernel in (finder, maker):
            cuda.load(kernel)
        rows, num_blocks = list[tuple[int, ...]](), 0
        for matrix, _ in matrices:
            height, width = matrix.numbers[3:5]
            down, across = _piece(height, width, matrix.itemsize)
            rows.append((*matrix.numbers[:5], down, across, *matrix.numbers[7:], num_blocks))
            num_blocks += -(-height // down) * -(-width // across)
        groups = torch.tensor([group for _, group in matrices], dtype=torch.int32)
        factors = [lanes_on_device(itemsize) for itemsize in (matrices[0][0].itemsize, 1, 4)]
        table = torch.tensor(rows, dtype=torch.int64)
        return cls(finder, maker, table.cuda(), groups.cuda(), num_blocks, factors)

    def launch(
        self, kernel: str, per_processor: int, stream: torch.cuda.Stream, memory: Iterable[torch.Tensor]
    ) -> None:
        pointers = (np.uint64(each.data_ptr()) for each in (self.groups, *memory))
        args = np.uint64(self.rows.data_ptr()), np.int64(len(self.rows)), np.int64(self.num_blocks), *pointers
        num_blocks = min(self.num_blocks, num_blocks_on_device(per_processor))
        cuda.launch(kernel, stream, num_blocks, _NUM_THREADS, args)


def _piece(rows: int, columns: int, itemsize: int) -> tuple[int, int]:
    """Return the rows and columns of the pieces in which a matrix is read."""
    numel = _PIECE_NBYTES // itemsize
    across = math.gcd(columns, numel)
    if across < min(columns, _LEAST_COLUMNS):
        across = min(columns, numel)
    return min(rows, numel // across), across
