"""Finds NaN and Inf in weights, and counts them in host memory.

`MASKS` has the bits that are all set only in NaN and Inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.memory.digests import host_bytes
from weightsync.plan.segment import ITEMSIZE

Int64 = npt.NDArray[np.int64]
_Words = npt.NDArray[np.unsignedinteger[Any]]

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

_Kernel = Callable[[_Words, _Words, _Words, _Words, Int64, Int64], None]


class NonfiniteTable:
    """Counts NaN and Inf in parts of a host buffer, each of one dtype."""

    def __init__(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """`parts`: dtype, first byte (a multiple of the dtype's size), number of bytes."""
        rows = [
            (start, nbytes if dtype in MASKS else 0, ITEMSIZE[dtype], MASKS.get(dtype, 0))
            for dtype, start, nbytes in parts
        ]
        self._table = np.array(rows, np.int64).reshape(-1, 4)
        _kernel()

    def __len__(self) -> int:
        return len(self._table)

    def count(self, memory: torch.Tensor, counts: Int64, first: int, end: int) -> None:
        """Count NaN and Inf in parts `first` to `end` of `memory`, into ``counts[first:end]``.

        `memory` is uint8[n] on the host, aligned to 8 bytes; `counts` is int64[len(self)].
        """
        held = host_bytes(memory)
        by1, by2, by4, by8 = (held[: len(held) // size * size].view(f"u{size}") for size in (1, 2, 4, 8))
        _kernel()(by1, by2, by4, by8, self._table[first:end], counts[first:end])


def count_nonfinite(data: torch.Tensor) -> int:
    """Return how many elements of a tensor are NaN or Inf."""
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


@functools.cache
def word_counter() -> Callable[[_Words, int], int]:
    """Return the function that counts words with all bits of a mask, made with Numba for other kernels."""
    from numba import njit

    block = 4096

    def in_words(words: _Words, mask: int) -> int:
        total = 0
        for at in range(0, len(words), block):
            part = words[at : at + block]
            found = False
            for k in range(len(part)):  # finds whether there are any, at the speed of memory
                found |= (part[k] & mask) == mask
            if found:
                for k in range(len(part)):
                    total += (part[k] & mask) == mask
        return total

    compiled: Callable[[_Words, int], int] = njit(nogil=True, cache=False)(in_words)
    return compiled


@functools.cache
def _kernel() -> _Kernel:
    """Return the counting kernel, compiled with Numba on the first call."""
    from numba import njit

    in_words = word_counter()

    def count(by1: _Words, by2: _Words, by4: _Words, by8: _Words, table: Int64, counts: Int64) -> None:
        for row in range(len(table)):
            size, mask = table[row, 2], table[row, 3]
            first, end = table[row, 0] // size, (table[row, 0] + table[row, 1]) // size
            if size == 1:
                counts[row] = in_words(by1[first:end], np.uint8(mask))
            elif size == 2:
                counts[row] = in_words(by2[first:end], np.uint16(mask))
            elif size == 4:
                counts[row] = in_words(by4[first:end], np.uint32(mask))
            else:
                counts[row] = in_words(by8[first:end], np.uint64(mask))

    compiled: _Kernel = njit(nogil=True, cache=False)(count)
    by1, by2, by4, by8 = (np.zeros(0, f"u{size}") for size in (1, 2, 4, 8))
    compiled(by1, by2, by4, by8, np.zeros((0, 4), np.int64), np.zeros(0, np.int64))
    return compiled
