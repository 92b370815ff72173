"""Quantises matrices on a GPU by one kernel, which also digests its input and output.

The kernel reads an element once. Elements of a block after the first 32 KiB are read twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.memory.kernels.device_factors import lanes_on_device, rows_on_device
from weightsync.memory.kernels.device_kernels import num_blocks_on_device
from weightsync.memory.kernels.digest_factors import COLUMNS
from weightsync.plan.layout.formats import TOGETHER, Format

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
"""Dtypes that kernels quantise, as spelled in kernels' names."""
_VALUES = {"float8_e4m3fn": "fp8", "int8": "int8"}
_FIRST_WITH_FP8 = (8, 9)
_NUM_THREADS, _BLOCKS_PER_PROCESSOR = 256, 3  # kQuantizers in kernels.cu, and as many as registers allow
_MOST_NUMEL = (1 << 16) - 1  # Divider in kernels.cu


def has_float8(weight: torch.Tensor) -> bool:
    """Return True if a tensor is on a GPU with float8."""
    return weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= _FIRST_WITH_FP8


def can_quantize(weight: torch.Tensor, form: Format) -> bool:
    """Return True if `quantize_into` accepts a matrix.

    The matrix must be on a GPU with float8, and be quantised to 8 bits with a scale per block.
    """
    fits = form.block[0] > 0 and math.prod(_block(weight, form)) <= _MOST_NUMEL
    return fits and form.rule not in TOGETHER and has_kernel(weight, form)


def has_kernel(weight: torch.Tensor, form: Format) -> bool:
    """Return True if `QuantizedMatrix` accepts a matrix, provided that the blocks fit."""
    is_held = has_float8(weight) and weight.is_contiguous() and weight.numel() > 0
    return is_held and weight.dtype in DTYPES and _kernel(weight.dtype, form) != ""


def quantize_into(weight: torch.Tensor, form: Format, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise a matrix on the current stream, to the bytes of `weightsync.quantising.quantize.quantize`.

    Args as in `QuantizedMatrix.of`.
    """
    with torch.cuda.device(weight.device):
        table = QuantizeTable([QuantizedMatrix.of(weight, form, values, scales)])
        table.launch(torch.cuda.current_stream())


@dataclass(frozen=True, slots=True)
class MatrixDigests:
    """The digests to which a matrix adds, as indices of source and stored digests.

    Attributes:
        source: index of the source digest.
        width: the columns of the whole tensor.
        values: index of the values' digest; None if values are not digested.
        scales: index of the scales' digest.
        row: index of the matrix's first row in the source tensor, seen as a matrix.
        stored_row: index of the first row in the stored tensor, a multiple of the rows of a block.
        column: index of the first column, a multiple of the columns of a block.
    """

    source: int
    width: int
    values: int | None = None
    scales: int | None = None
    row: int = 0
    stored_row: int = 0
    column: int = 0

    def numbers(self, block: tuple[int, int], columns: int) -> tuple[int, ...]:
        """Return `gap` to `of_scales` of `Matrix` in kernels.cu, for a matrix with `columns`."""
        across, scales = (-(-each // block[1]) for each in (columns, self.width))
        return (
            self.width - columns,
            scales - across,
            *(first * self.width + self.column for first in (self.row, self.stored_row)),
            self.stored_row // block[0] * scales + self.column // block[1],
            *(-1 if number is None else number for number in (self.source, self.values, self.scales)),
        )


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Addresses and shapes of a matrix to quantise. Keeps no memory alive.

    Attributes:
        kernel: name of the kernel.
        itemsize: bytes per element of the matrix.
        num_blocks: number of blocks with a scale.
        num_words: number of the tensor's elements up to the matrix's last element.
        numbers: addresses of the matrix, the values and the scales; rows and columns of the matrix and of a
            block; then `MatrixDigests.numbers`.
    """

    kernel: str
    itemsize: int
    num_blocks: int
    num_words: int
    numbers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        form: Format,
        values: torch.Tensor,
        scales: torch.Tensor,
        digests: MatrixDigests | None = None,
    ) -> QuantizedMatrix:
        """
        Args:
            weight: [rows, columns], which `has_kernel` accepts.
            values: [rows, columns], contiguous, of a dtype of 8 bits.
            scales: float32, contiguous, with as many elements as ``form.grid(weight.shape)``.
            digests: the digests to which the matrix adds, if any.
        """
        addresses = (each.data_ptr() for each in (weight, values, scales))
        (rows, columns), block = weight.shape, _block(weight, form)
        numbers = digests.numbers(block, columns) if digests else (0, 0, 0, 0, 0, -1, -1, -1)
        gap, _, *before = numbers[:4]
        return cls(
            _kernel(weight.dtype, form),
            weight.element_size(),
            scales.numel(),
            max(before) + rows * (columns + gap),
            (*addresses, rows, columns, *block, *numbers),
        )


class QuantizeTable:
    """Matrices to quantise on the current device, by one launch per kernel."""

    def __init__(
        self,
        matrices: Sequence[QuantizedMatrix],
        sources: torch.Tensor | None = None,
        stored: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            sources: int64 digests of the sources, to which launches add. The caller zeroes the digests.
            stored: digests of the results, likewise. Both are None if no matrix has digests.
        """
        by_kernel: dict[str, list[QuantizedMatrix]] = {}
        for matrix in (each for each in matrices if each.num_blocks):
            by_kernel.setdefault(matrix.kernel, []).append(matrix)
        self._tables = [_Table.of(kernel, its) for kernel, its in by_kernel.items()]
        num_words = max((each.num_words for each in matrices), default=0) if sources is not None else 0
        self._rows = rows_on_device(-(-num_words // COLUMNS))
        self._totals = sources, stored

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start the kernels on `stream`."""
        for table in self._tables:
            table.launch(stream, (*table.columns, self._rows, *self._totals))


@dataclass(frozen=True, slots=True)
class _Table:
    """Matrices for one kernel: int64[n, 16], `Matrix` in kernels.cu."""

    kernel: str
    rows: torch.Tensor
    num_blocks: int
    columns: Sequence[torch.Tensor]

    @classmethod
    def of(cls, kernel: str, matrices: Sequence[QuantizedMatrix]) -> _Table:
        cuda.load(kernel)
        ends = list(itertools.accumulate(matrix.num_blocks for matrix in matrices))
        rows = [(*each.numbers, end - each.num_blocks) for each, end in zip(matrices, ends, strict=True)]
        columns = [lanes_on_device(itemsize) for itemsize in (matrices[0].itemsize, 1, 4)]
        return cls(kernel, torch.tensor(rows, dtype=torch.int64).cuda(), ends[-1], columns)

    def launch(self, stream: torch.cuda.Stream, memory: Iterable[torch.Tensor | None]) -> None:
        pointers = (np.uint64(0 if each is None else each.data_ptr()) for each in memory)
        args = np.uint64(self.rows.data_ptr()), np.int64(len(self.rows)), np.int64(self.num_blocks), *pointers
        num_blocks = min(self.num_blocks, num_blocks_on_device(_BLOCKS_PER_PROCESSOR))
        cuda.launch(self.kernel, stream, num_blocks, _NUM_THREADS, args)


def _block(weight: torch.Tensor, form: Format) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    rows, columns = (block or size for block, size in zip(form.block, weight.shape, strict=True))
    return rows, columns


def _kernel(dtype: torch.dtype, form: Format) -> str:
    """Return the name of the kernel for a dtype and format, or ""."""
    if form.packed or not form.symmetric or form.powers_of_two or form.values not in _VALUES:
        return ""
    if form.rule in TOGETHER:
        return f"shared_values_{DTYPES[dtype]}"
    rule = {"fp8": "vllm", "compressed-tensors": "compressed", "sglang": "sglang"}.get(form.rule)
    return f"{rule}_{_VALUES[form.values]}_{DTYPES[dtype]}" if rule else ""
