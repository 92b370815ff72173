"""Kernels on host memory, compiled by Numba. Import this module on use: Numba takes half a second.

Machine code is stored in ``__pycache__`` or ``NUMBA_CACHE_DIR``, since compiling would take every process
some seconds.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from weightsync.memory.kernels.digest_factors import GOLDEN, WORD_KINDS
from weightsync.protocol.messages import Digests

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Int64 = npt.NDArray[np.int64]
_Words = npt.NDArray[np.unsignedinteger[Any]]

_BYTES, _PAIRS = WORD_KINDS[1], WORD_KINDS[2]
_BLOCK_NBYTES = 256 << 10
"""Bytes that are copied, then digested and searched while they are still in the core's own cache."""
_COUNTED = 4096
_GOLDEN, _ONE = np.uint64(GOLDEN), np.uint64(1)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Numba's cache of a function, for processes that compile it at the same time.

    Numba numbers files by an index that it reads and then writes. Two processes with code for different types
    used the same number, and a third process loaded the wrong code.
    """

    def save_overload(self, sig: object, data: object) -> None:
        """Save compiled code, one process at a time. Errors are ignored."""
        folder = Path(self.cache_path)
        with suppress(OSError):  # such as a full disk, or a file system without locks
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "weightsync.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super().save_overload(sig, data)


def _compiled(function: _Function) -> _Function:
    made = njit(nogil=True)(function)
    with suppress(RuntimeError):  # no folder is writable
        made._cache = _Cache(function)  # as `cache=True` does, with another class
    compiled: _Function = made
    return compiled


def _pointer(dtype: Any) -> Any:  # noqa: ANN401 (numba's types)
    def of_address(_context: object, address: Any) -> Any:  # noqa: ANN401
        kind = types.CPointer(dtype)

        def make(context: Any, builder: Any, _: object, args: Any) -> Any:  # noqa: ANN401
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(address), make

    return intrinsic(of_address)


_at8, _at16, _at32, _at64 = map(_pointer, (types.uint8, types.uint16, types.uint32, types.uint64))


@intrinsic  # type: ignore[untyped-decorator]
def _copy(_context: object, target: Any, source: Any, nbytes: Any) -> Any:  # noqa: ANN401
    def make(_: object, builder: Any, __: object, args: Any) -> Any:  # noqa: ANN401
        to, come = (builder.inttoptr(each, cgutils.voidptr_t) for each in args[:2])
        cgutils.raw_memcpy(builder, to, come, args[2], 1)
        return cgutils.int32_t(0)

    return types.int32(target, source, nbytes), make


@_compiled
def digest(words: _Words, starts: _Int64, run: int, columns: Digests, ones: int) -> np.uint64:
    """Digest runs of words. Torch's integer operations took three to six times as long.

    Args:
        words: the runs, one after the other.
        starts: the index of each run's first word in the tensor.
        run: words per run.
        columns: the factors of a row's words. Lanes are words of 4 bytes, with other factors.
        ones: the number to add to each word.
    """
    total, width, offset = np.uint64(0), np.int64(len(columns)), np.uint64(ones)
    at = 0
    for start in starts:
        index, left = start, run
        while left > 0:
            column = index % width
            count = min(width - column, left)
            factors, part = columns[column : column + count], words[at : at + count]
            inner = np.uint64(0)
            for k in range(count):
                inner += factors[k] * (np.uint64(part[k]) + offset)
            z = np.uint64(index // width + 1) * _GOLDEN
            z = (z ^ (z >> _S30)) * _FIRST
            z = (z ^ (z >> _S27)) * _SECOND
            total += inner * ((z ^ (z >> _S31)) | _ONE)
            index += count
            at += count
            left -= count
    return total


@_compiled
def _count_words(words: _Words, mask: np.unsignedinteger[Any]) -> int:
    total = 0
    for at in range(0, len(words), _COUNTED):
        part = words[at : at + _COUNTED]
        found = False
        for k in range(len(part)):  # finds whether there are any, at the speed of memory
            found |= (part[k] & mask) == mask
        if found:
            for k in range(len(part)):
                total += (part[k] & mask) == mask
    return total


@_compiled
def count_nonfinite(
    by1: _Words, by2: _Words, by4: _Words, by8: _Words, table: _Int64, counts: _Int64
) -> None:
    """Count words with all bits of a mask, in rows of `table`: first byte, bytes, bytes per word and mask.

    `by1` to `by8` are the same memory in words of 1 to 8 bytes.
    """
    for row in range(len(table)):
        size, mask = table[row, 2], table[row, 3]
        first, end = table[row, 0] // size, (table[row, 0] + table[row, 1]) // size
        if size == 1:
            counts[row] = _count_words(by1[first:end], np.uint8(mask))
        elif size == 2:
            counts[row] = _count_words(by2[first:end], np.uint16(mask))
        elif size == 4:
            counts[row] = _count_words(by4[first:end], np.uint32(mask))
        else:
            counts[row] = _count_words(by8[first:end], np.uint64(mask))


@_compiled
def _share(
    address: int, nbytes: int, kind: int, first: _Int64, run: int, columns: Digests, ones: int
) -> np.uint64:
    # The digest is of the original, not of the copy, so that it reveals a wrong copy.
    if kind == _BYTES:
        return digest(carray(_at8(address), nbytes), first, run, columns, ones)
    if kind == _PAIRS:
        return digest(carray(_at16(address), nbytes // 2), first, run, columns, ones)
    return digest(carray(_at32(address), nbytes // 4), first, run, columns, ones)


@_compiled
def _nonfinite(address: int, nbytes: int, itemsize: int, mask: int) -> int:
    if itemsize == 1:
        return _count_words(carray(_at8(address), nbytes), np.uint8(mask))
    if itemsize == 2:
        return _count_words(carray(_at16(address), nbytes // 2), np.uint16(mask))
    if itemsize == 4:
        return _count_words(carray(_at32(address), nbytes // 4), np.uint32(mask))
    return _count_words(carray(_at64(address), nbytes // 8), np.uint64(mask))


@_compiled
def copy_and_digest(
    low: int,
    high: int,
    count: bool,
    rows: _Int64,
    starts: _Int64,
    factors: Digests,
    sizes: _Int64,
    shares: Digests,
    counts: _Int64,
) -> None:
    """Copy, digest and search parts `low` to `high`, see `weightsync.memory.kernels.host_table.HostTable`.

    Args:
        count: whether NaN and Inf are counted.
        rows: address, target, bytes, kind, first and last of `starts`, words per run, mask and itemsize.
            Kinds come from `WORD_KINDS` and `LANE_KINDS`; 0 means no digest.
        starts: as of `digest`, part after part.
        factors, sizes: for each kind, the factors of a row's words, their number, and `ones` of `digest`.
        shares, counts: the digest and the count of each part, which are written.
    """
    start = np.zeros(1, np.int64)
    for i in range(low, high):
        address, target, nbytes, kind = rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3]
        first, run = starts[rows[i, 4] : rows[i, 5]], rows[i, 6]
        mask, itemsize = rows[i, 7] if count else 0, rows[i, 8]
        columns, ones = factors[kind, : sizes[kind, 0]], sizes[kind, 1]
        is_one = kind != 0 and len(first) == 1
        length = _BLOCK_NBYTES if is_one and (target != 0 or mask != 0) else nbytes
        total, found = np.uint64(0), 0
        for at in range(0, nbytes, max(length, 1)):
            length = min(length, nbytes - at)
            if target:
                _copy(target + at, address + at, length)
            if is_one:
                words = length // (nbytes // run)
                start[0] = first[0] + at // (nbytes // run)
                total += _share(address + at, length, kind, start, words, columns, ones)
            elif kind:
                total = _share(address, nbytes, kind, first, run, columns, ones)
            if mask:
                found += _nonfinite(address + at, length, itemsize, mask)
        shares[i], counts[i] = total, found
