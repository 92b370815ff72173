"""A box: an N-dimensional slice of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box"]


@dataclass(frozen=True, slots=True)
class Box:
    """`extent` elements per dimension, starting at `offset`. A 0-d box holds one element."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __reduce__(self) -> tuple[type[Box], tuple[tuple[int, ...], tuple[int, ...]]]:
        return Box, (self.offset, self.extent)

    @property
    def ndim(self) -> int:
        return len(self.extent)

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element, per dimension."""
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both, or None if there are none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        extent = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, extent) if all(e > 0 for e in extent) else None

    def contains(self, other: Box) -> bool:
        """Whether each element of `other` is in this box; an empty `other` always is."""
        return other.numel == 0 or self.intersect(other) == other

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Indices of this box in an array that holds `origin` (by default: the whole tensor)."""
        base = origin.offset if origin else (0,) * self.ndim
        return tuple(slice(o - b, o - b + e) for o, b, e in zip(self.offset, base, self.extent, strict=True))

    def split(self, max_numel: int) -> Iterator[Box]:
        """Parts of at most `max_numel` elements, in row-major order; together they are this box.

        Each part is a run of rows of one dimension, so it is contiguous wherever the box is.
        """
        assert max_numel > 0
        if self.numel == 0:
            return
        if self.numel <= max_numel:
            yield self
            return
        axis = self.ndim - 1
        while math.prod(self.extent[axis:]) <= max_numel:
            axis -= 1
        rows = max_numel // math.prod(self.extent[axis + 1 :])
        ones, tail = (1,) * axis, slice(axis + 1, None)
        leading = (range(o, o + e) for o, e in zip(self.offset[:axis], self.extent[:axis], strict=True))
        first, last = self.offset[axis], self.end[axis]
        for outer in itertools.product(*leading):
            for row in range(first, last, rows):
                extent = (*ones, min(rows, last - row), *self.extent[tail])
                yield Box((*outer, row, *self.offset[tail]), extent)
