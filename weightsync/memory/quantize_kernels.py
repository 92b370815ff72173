"""Quantises matrices on a GPU by one kernel, which reads each element once from memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.memory.kernels import NUM_THREADS
from weightsync.plan.formats import Format

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_VALUES = {"float8_e4m3fn": "fp8", "int8": "int8"}
_FIRST_WITH_FP8 = (8, 9)
_MOST_NUMEL = (1 << 16) - 1  # Divider in kernels.cu


def can_quantize(weight: torch.Tensor, form: Format) -> bool:
    """Whether `quantize_into` takes a matrix: on a GPU with float8, to 8 bits, with a scale for blocks."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < _FIRST_WITH_FP8:
        return False
    rows, columns = _block(weight, form)
    fits = 0 < rows * columns <= _MOST_NUMEL and weight.dtype in _DTYPES
    return fits and weight.is_contiguous() and _kernel(weight.dtype, form) != ""


def quantize_into(weight: torch.Tensor, form: Format, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise a matrix on the current stream, to the bytes of `weightsync.memory.quantize.quantize`.

    Args as in `QuantizedMatrix.of`.
    """
    with torch.cuda.device(weight.device):
        table = QuantizeTable([QuantizedMatrix.of(weight, form, values, scales)])
        table.launch(torch.cuda.current_stream())


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix to quantise. It holds addresses, and keeps no memory alive.

    Attributes:
        kernel: the kernel that does it.
        num_blocks: the blocks that have a scale.
        numbers: addresses of the matrix, the values and the scales, rows and columns, and those of a block.
    """

    kernel: str
    num_blocks: int
    numbers: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: torch.Tensor, form: Format, values: torch.Tensor, scales: torch.Tensor
    ) -> QuantizedMatrix:
        """
        Args:
            weight: [rows, columns], which `can_quantize` accepts.
            values: [rows, columns], contiguous, of a dtype of 8 bits.
            scales: float32, contiguous, of the shape ``form.grid(weight.shape)``.
        """
        addresses = (each.data_ptr() for each in (weight, values, scales))
        sizes = (*weight.shape, *_block(weight, form))
        return cls(_kernel(weight.dtype, form), scales.numel(), (*addresses, *sizes))


class QuantizeTable:
    """Matrices to quantise on the current device, by one launch for each kernel."""

    def __init__(self, matrices: Sequence[QuantizedMatrix]) -> None:
        by_kernel: dict[str, list[QuantizedMatrix]] = {}
        for matrix in (each for each in matrices if each.num_blocks):
            by_kernel.setdefault(matrix.kernel, []).append(matrix)
        self._tables = []
        for kernel, its in by_kernel.items():
            cuda.load(kernel)
            ends = list(itertools.accumulate(matrix.num_blocks for matrix in its))
            rows = [(*matrix.numbers, end - matrix.num_blocks) for matrix, end in zip(its, ends, strict=True)]
            self._tables.append((kernel, torch.tensor(rows, dtype=torch.int64).cuda(), ends[-1]))

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start the kernels on `stream`."""
        for kernel, table, num_blocks in self._tables:
            args = np.uint64(table.data_ptr()), np.int64(len(table))
            cuda.launch(kernel, stream, num_blocks, NUM_THREADS, args)


def _block(weight: torch.Tensor, form: Format) -> tuple[int, int]:
    """Return the rows and columns of a block; all rows count as none, for which there is no kernel."""
    rows, columns = form.block
    return rows, columns or weight.shape[1]


def _kernel(dtype: torch.dtype, form: Format) -> str:
    """Return the kernel for a dtype and format, "" if there is none."""
    if form.packed or not form.symmetric or form.powers_of_two or form.values not in _VALUES:
        return ""
    rule = {"fp8": "vllm", "compressed-tensors": "compressed"}.get(form.rule)
    return f"{rule}_{_VALUES[form.values]}_{_DTYPES[dtype]}" if rule else ""
