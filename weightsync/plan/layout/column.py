"""Columns: numbers of many rows, as they travel."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.signedinteger[Any]]
"""Numbers in the smallest signed type that holds them all, so equal numbers have equal bytes."""

Positions = npt.NDArray[np.int64]
"""Positions of rows, or numbers of things."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def column(numbers: Iterable[int]) -> Column:
    """Make a column. Raises OverflowError for a number that int64 does not hold."""
    return narrowed(np.array([*numbers], np.int64))


def narrowed(wide: Column) -> Column:
    """Return the same numbers as a column."""
    low, high = int(wide.min(initial=0)), int(wide.max(initial=0))
    limits = ((kind, np.iinfo(kind)) for kind in (np.int8, np.int16, np.int32, np.int64))
    return wide.astype(next(kind for kind, limit in limits if limit.min <= low and high <= limit.max))


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """A column that is kept and passed on more often than read, compressed."""

    kind: str
    packed: bytes

    @classmethod
    def of(cls, numbers: Iterable[int]) -> PackedColumn:
        """Pack numbers. Raises OverflowError for one that int64 does not hold."""
        made = column(numbers)
        return cls(made.dtype.str, zlib.compress(made.tobytes(), 1))

    def tolist(self) -> list[int]:
        """Return the numbers."""
        numbers: list[int] = np.frombuffer(zlib.decompress(self.packed), self.kind).tolist()
        return numbers


def row_codes(columns: Sequence[Column]) -> npt.NDArray[np.uint64]:
    """Return a number for each row; different rows rarely have the same."""
    code = np.zeros(len(columns[0]), np.uint64)
    for each in columns:
        code = (code + each.astype(np.uint64)) * _GOLDEN
        code ^= code >> np.uint64(32)
    code *= _GOLDEN
    return code


def number_rows(columns: Sequence[Column]) -> Positions:
    """Number the rows from 0 without gaps, with equal numbers only for equal rows."""
    numbers = np.zeros(len(columns[0]), np.int64)
    for each in columns:
        _, inverse = np.unique(each, return_inverse=True)
        if inverse.any():
            _, numbers = np.unique(numbers * len(numbers) + inverse, return_inverse=True)
    return numbers


def ranges(first: Positions, count: Positions) -> Positions:
    """Return the numbers of all ranges, one range after the other: `count` from each `first` on."""
    ends = np.cumsum(count)
    found: Positions = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - count), count)
    return found


def repeated(parts: Positions) -> tuple[Positions, Positions]:
    """Return the row of each part, and the part's number in its row."""
    index = np.repeat(np.arange(len(parts)), parts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
