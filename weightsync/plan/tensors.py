"""What a tensor is called, holds and measures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from heapq import nlargest
from itertools import takewhile
from types import MappingProxyType

from weightsync.errors import PlanError, nearest

__all__ = ["CASTABLE", "ITEMSIZE", "MOST_NBYTES", "TensorMeta", "suggest"]

ITEMSIZE = MappingProxyType(
    {
        "bfloat16": 2,
        "bool": 1,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes per element, by torch's name without its prefix."""

CASTABLE = frozenset({"bfloat16", "float16", "float32", "float64"})
"""Dtypes that are cast to one another. A float8 is not: its values need a scale, which no cast makes."""

MOST_NBYTES = 1 << 52
"""The largest tensor, and the largest model: sums stay exact in int64, and in float64 where NumPy uses it."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's name, dtype (a key of `ITEMSIZE`) and shape.

    Raises:
        PlanError: the dtype is unknown, the shape has a negative dimension, or it spans more than 4 PiB.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise PlanError(self.name, f"unknown dtype {self.dtype!r}; {nearest(self.dtype, ITEMSIZE)}")
        if any(dim < 0 for dim in self.shape):
            raise PlanError(
                self.name, f"shape {self.shape} has a negative dimension; give sizes of 0 or more"
            )
        # As Python's integers: NumPy's would wrap around. A dimension beside one of 0 counts too.
        nbytes = math.prod(int(dim) or 1 for dim in self.shape) * self.itemsize
        if nbytes > MOST_NBYTES:
            problem = f"{self.dtype} of shape {self.shape} spans {nbytes} bytes"
            raise PlanError(self.name, f"{problem}; give sizes that span at most {MOST_NBYTES} (4 PiB)")

    def __reduce__(self) -> tuple[type[TensorMeta], tuple[str, str, tuple[int, ...]]]:
        return TensorMeta, (self.name, self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def suggest(word: str, known: Iterable[str], num_shown: int = 5) -> str:
    """`nearest`, but fit for the names of a whole model: compares few and shows fewer."""
    names = sorted(known)
    if len(names) > num_shown:
        alike = nlargest(10 * num_shown, names, key=lambda name: _num_shared(word, name))
        names = get_close_matches(word, alike, n=num_shown, cutoff=0.0)
    return nearest(word, names)


def _num_shared(one: str, other: str) -> int:
    """Characters that the two have in common at their starts and at their ends."""
    ends = (zip(one, other, strict=False), zip(reversed(one), reversed(other), strict=False))
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) for pairs in ends)
