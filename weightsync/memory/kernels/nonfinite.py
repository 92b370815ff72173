"""Finds NaN and Inf in weights, and counts them in host memory.

`MASKS` has the bits that are all set only in NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from weightsync.memory.kernels.digests import host_bytes
from weightsync.plan.layout.segment import ITEMSIZE

Int64 = npt.NDArray[np.int64]

MASKS = MappingProxyType(
    {
        "bfloat16": 0x7F80,
        "float16": 0x7C00,
        "float32": 0x7F80_0000,
        "float64": 0x7FF0_0000_0000_0000,
        "float8_e4m3fn": 0x7F,
        "float8_e5m2": 0x7C,
    }
)


class NonfiniteTable:
    """Counts NaN and Inf in parts of a host buffer. A part has one dtype."""

    def __init__(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """`parts`: dtype, first byte (a multiple of the dtype's size), number of bytes."""
        rows = [
            (start, nbytes if dtype in MASKS else 0, ITEMSIZE[dtype], MASKS.get(dtype, 0))
            for dtype, start, nbytes in parts
        ]
        self._table = np.array(rows, np.int64).reshape(-1, 4)
        self.count(torch.zeros(0, dtype=torch.uint8), np.zeros(0, np.int64), 0, 0)  # compiles the kernel

    def __len__(self) -> int:
        return len(self._table)

    def count(self, memory: torch.Tensor, counts: Int64, first: int, end: int) -> None:
        """Count NaN and Inf in parts `first` to `end` of `memory`, into ``counts[first:end]``.

        `memory` is uint8[n] on the host, aligned to 8 bytes; `counts` is int64[len(self)].
        """
        from weightsync.memory.kernels.host_kernels import count_nonfinite

        held = host_bytes(memory)
        by1, by2, by4, by8 = (held[: len(held) // size * size].view(f"u{size}") for size in (1, 2, 4, 8))
        count_nonfinite(by1, by2, by4, by8, self._table[first:end], counts[first:end])


def count_nonfinite(data: torch.Tensor) -> int:
    """Return the number of NaN and Inf elements of a tensor."""
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype not in MASKS or not data.numel():
        return 0
    if data.is_cuda:
        return int((~torch.isfinite(data.float() if data.itemsize == 1 else data)).sum())
    memory = data.detach().contiguous().reshape(-1).view(torch.uint8)
    memory = memory.clone() if memory.data_ptr() % 8 else memory
    counts = np.zeros(1, np.int64)
    NonfiniteTable([(dtype, 0, data.nbytes)]).count(memory, counts, 0, 1)
    return int(counts[0])


def word_mask(dtype: str) -> int:
    """Return the mask for `DigestPart`: 0 for a dtype without NaN and Inf.

    A float64 has two words, and only the upper one has the exponent: some finite numbers look like NaN.
    """
    mask = MASKS.get(dtype, 0)
    return mask >> 32 if mask > 0xFFFF_FFFF else mask
