"""Quantises a matrix on a GPU by one kernel, which reads each element once from memory."""

from __future__ import annotations

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

    Args as in `QuantizeLaunch.of`.
    """
    with torch.cuda.device(weight.device):
        QuantizeLaunch.of(weight, form, values, scales).launch(torch.cuda.current_stream())


@dataclass(frozen=True, slots=True)
class QuantizeLaunch:
    """A launch that quantises a matrix. It holds addresses, and keeps no memory alive."""

    kernel: str
    num_blocks: int
    args: tuple[object, ...]

    @classmethod
    def of(
        cls, weight: torch.Tensor, form: Format, values: torch.Tensor, scales: torch.Tensor
    ) -> QuantizeLaunch:
        """
        Args:
            weight: [rows, columns], which `can_quantize` accepts.
            values: [rows, columns], contiguous, of a dtype of 8 bits.
            scales: float32, contiguous, of the shape ``form.grid(weight.shape)``.
        """
        pointers = (np.uint64(each.data_ptr()) for each in (weight, values, scales))
        sizes = (np.int64(size) for size in (*weight.shape, *_block(weight, form)))
        return cls(_kernel(weight.dtype, form), scales.numel(), (*pointers, *sizes))

    def load(self) -> None:
        """Load the kernel on the current device, so that no update waits for it."""
        cuda.load(self.kernel)

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start the kernel on `stream`."""
        cuda.launch(self.kernel, stream, self.num_blocks, NUM_THREADS, self.args)


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
