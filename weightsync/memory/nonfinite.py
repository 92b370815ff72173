"""Finds NaN and Inf in weights, and counts them in host memory.

Elements are checked eight bytes at a time. `MASKS` has the bits that are all set only in NaN and Inf, so
``~element & mask`` is zero for those. For all others, adding ``0x7fff…`` to it carries into the sign bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from weightsync.memory.digests import host_bytes
from weightsync.plan.segment import ITEMSIZE

__all__ = ["MASKS", "NonfiniteTable", "count_nonfinite", "word_mask"]

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]

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

_KINDS = (*MASKS,)
_Kernel = Callable[[Uint64, Uint64, Int64, Int64], None]


class NonfiniteTable:
    """Counts NaN and Inf in parts of a host buffer, each of one dtype."""

    def __init__(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """`parts`: dtype, first byte (a multiple of the dtype's size), number of bytes."""
        rows = [(start, nbytes if dtype in MASKS else 0, _kind(dtype)) for dtype, start, nbytes in parts]
        self._table = np.array(rows, np.int64).reshape(-1, 3)
        _kernel()(np.zeros(0, np.uint64), _bits(), self._table[:0], np.zeros(0, np.int64))  # compiles it

    def __len__(self) -> int:
        return len(self._table)

    def count(self, memory: torch.Tensor, counts: Int64, first: int, end: int) -> None:
        """Count NaN and Inf in parts `first` to `end` of `memory`, into ``counts[first:end]``.

        `memory` is uint8[n] on the host, n a multiple of 8; `counts` is int64[len(self)].
        """
        words = host_bytes(memory).view(np.uint64)
        _kernel()(words, _bits(), self._table[first:end], counts[first:end])


def count_nonfinite(data: torch.Tensor) -> int:
    """Return how many elements of a tensor are NaN or Inf."""
    dtype = str(data.dtype).removeprefix("torch.")
    if dtype not in MASKS or not data.numel():
        return 0
    if data.is_cuda:
        return int((~torch.isfinite(data.float() if data.itemsize == 1 else data)).sum())
    memory = data.detach().contiguous().reshape(-1).view(torch.uint8)
    if memory.data_ptr() % 8 or len(memory) % 8:
        padded = torch.zeros(-(-len(memory) // 8) * 8, dtype=torch.uint8)
        padded[: len(memory)] = memory
        memory = padded
    counts = np.zeros(1, np.int64)
    NonfiniteTable([(dtype, 0, data.nbytes)]).count(memory, counts, 0, 1)
    return int(counts[0])


def word_mask(dtype: str) -> int:
    """Return the mask for `DigestPart`: 0 for a dtype without NaN and Inf.

    A float64 has two words, and only the upper one has the exponent: some finite numbers look like NaN.
    """
    mask = MASKS.get(dtype, 0)
    return mask >> 32 if mask > 0xFFFF_FFFF else mask


def _kind(dtype: str) -> int:
    return _KINDS.index(dtype) if dtype in MASKS else 0


def _in_each(dtype: str, value: int) -> int:
    """Return eight bytes with `value` in each element."""
    return sum(value << shift for shift in range(0, 64, 8 * ITEMSIZE[dtype]))


@functools.cache
def _bits() -> Uint64:
    """Return mask, addend and sign bits of each of `_KINDS`: uint64[num_kinds, 3]."""
    signs = [(dtype, 1 << (8 * ITEMSIZE[dtype] - 1)) for dtype in _KINDS]
    rows = [
        (_in_each(dtype, MASKS[dtype]), _in_each(dtype, sign - 1), _in_each(dtype, sign))
        for dtype, sign in signs
    ]
    return np.array(rows, np.uint64)


@functools.cache
def _kernel() -> _Kernel:
    """Return the counting kernel, compiled with Numba on first use."""
    from numba import njit

    zero, one, eight = np.uint64(0), np.uint64(1), np.uint64(8)
    block_words = np.int64(2048)

    @njit(nogil=True, cache=False)  # type: ignore[untyped-decorator]
    def in_word(word: int, mask: int, add: int, signs: int) -> int:
        found, total = ~((~word & mask) + add) & signs, 0
        while found != zero:
            found &= found - one
            total += 1
        return total

    def count(words: Uint64, bits: Uint64, table: Int64, counts: Int64) -> None:
        for row in range(len(table)):
            kind = bits[table[row, 2]]
            mask, add, signs = kind[0], kind[1], kind[2]
            start, stop, total = table[row, 0], table[row, 0] + table[row, 1], 0
            at, end = start // 8, stop // 8
            head, rest = np.uint64(start % 8), np.uint64(stop % 8)
            low = (one << (eight * rest)) - one
            if head != zero and start < stop:
                high = ~((one << (eight * head)) - one)
                if at == end:  # the part ends in its first word
                    high &= low
                    rest = zero
                total += in_word(words[at] & high, mask, add, signs)
                at += 1
            while at < end:
                num = min(block_words, end - at)
                block = words[at : at + num]
                finite = signs
                for k in range(num):
                    finite &= (~block[k] & mask) + add
                if finite != signs:
                    for k in range(num):
                        total += in_word(block[k], mask, add, signs)
                at += num
            if rest != zero and start < stop:
                total += in_word(words[end] & low, mask, add, signs)
            counts[row] = total

    compiled: _Kernel = njit(nogil=True, cache=False)(count)
    return compiled
