"""Columns: numbers of many rows, as they travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.signedinteger[Any]]
"""Numbers in the smallest signed type that holds them all, so equal numbers have equal bytes."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def column(numbers: Iterable[int]) -> Column:
    """Make a column. Raises OverflowError for a number that int64 does not hold."""
    return narrowed(np.array([*numbers], np.int64))


def narrowed(wide: Column) -> Column:
    """Return the same numbers as a column."""
    low, high = int(wide.min(initial=0)), int(wide.max(initial=0))
    limits = ((kind, np.iinfo(kind)) for kind in (np.int8, np.int16, np.int32, np.int64))
    return wide.astype(next(kind for kind, limit in limits if limit.min <= low and high <= limit.max))


def row_codes(columns: Sequence[Column]) -> npt.NDArray[np.uint64]:
    """Return a number for each row; different rows rarely have the same."""
    code = np.zeros(len(columns[0]), np.uint64)
    for each in columns:
        code = (code + each.astype(np.uint64)) * _GOLDEN
        code ^= code >> np.uint64(32)
    code *= _GOLDEN
    return code
