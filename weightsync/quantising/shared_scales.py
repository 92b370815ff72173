"""Quantises matrices that share scales, on a GPU. One kernel finds maxima, another kernel makes values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.memory import cuda
from weightsync.memory.kernels.device_kernels import num_blocks_on_device
from weightsync.plan.layout.formats import TOGETHER, Format
from weightsync.quantising.quantize_kernels import DTYPES, has_float8

_NUM_THREADS, _BLOCKS_PER_PROCESSOR = 256, 4  # kQuantizers in kernels.cu, and enough loads in flight


def can_share_scales(weights: Sequence[torch.Tensor], forms: Sequence[Format]) -> bool:
    """Return True if the kernels accept `weights`.

    The matrices must be contiguous, on a GPU with float8, and quantised by a rule of `TOGETHER`.
    """
    fit = (each.is_contiguous() and each.dtype in DTYPES and each.numel() > 0 for each in weights)
    return all(map(has_float8, weights)) and all(fit) and all(form.rule in TOGETHER for form in forms)


def largest_of_blocks(weights: Sequence[torch.Tensor], forms: Sequence[Format]) -> torch.Tensor:
    """Return the greatest magnitude of each block in any of the matrices, without NaN: float32, row-major."""
    down, across = forms[0].grid(weights[0].shape)
    largest = torch.zeros(down * across, dtype=torch.float32, device=weights[0].device)
    for weight, form in zip(weights, forms, strict=True):
        _launch("largest", weight, form, largest)
    return largest


def scaled_values(weight: torch.Tensor, form: Format, inverses: torch.Tensor) -> torch.Tensor:
    """Return a matrix in float8, with blocks multiplied by `inverses`: float32, row-major."""
    values = torch.empty(weight.shape, dtype=getattr(torch, form.values), device=weight.device)
    _launch("scaled", weight, form, inverses, values)
    return values


def _launch(kind: str, weight: torch.Tensor, form: Format, *memory: torch.Tensor) -> None:
    """Start a kernel on the current stream."""
    block = (given or size for given, size in zip(form.block, weight.shape, strict=True))
    numbers = (np.int64(number) for number in (*weight.shape, *block))
    pointers = [np.uint64(each.data_ptr()) for each in (weight, *memory)]
    with torch.cuda.device(weight.device):
        cuda.launch(
            f"{kind}_{DTYPES[weight.dtype]}",
            torch.cuda.current_stream(),
            num_blocks_on_device(_BLOCKS_PER_PROCESSOR),
            _NUM_THREADS,
            (pointers[0], *numbers, *pointers[1:]),
        )
