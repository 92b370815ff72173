"""Codes of changed elements, tile by tile: which elements of a tile have changed, and their new values.

A tile is up to `TILE` elements of one width. Values are absolute, and compared and copied as integers of the
element's width. So a delta may be applied twice, and NaN payloads, -0.0 and denormals stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import WireError

TILE = 1 << 16
"""The most elements of a tile. A place in a tile fits in 16 bits."""

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[Any]
"""Unsigned integers of the width of a tile's elements."""
Int64 = npt.NDArray[np.int64]
_ESCAPE = 255
"""A byte of `Code.GAPS` that adds 255 to the gap that the next byte ends."""


class Code(IntEnum):
    """How a tile says which elements have changed. All but `NOTHING` are followed by the new values.

    RUNS: for each run of neighbours, the first place and the length less one, as two rows of uint16.
    GAPS: the number of unchanged elements before each changed one, in bytes, see `_ESCAPE`.
    BITMAP: a bit for each element of the tile, the highest bit of a byte first.
    DENSE: no index: all elements have values.
    """

    NOTHING = 0
    RUNS = 1
    GAPS = 2
    BITMAP = 3
    DENSE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """One tile's changes.

    Attributes:
        index: which elements have changed, by `code`: uint8, one dimension.
        values: the elements' new values, in order of place.
    """

    code: Code
    index: Bytes
    values: Elements

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.values.nbytes

    def places(self, num_elements: int) -> Int64:
        """Return the places of `values` in a tile of `num_elements`, rising.

        Raises WireError if the index is damaged.
        """
        try:
            places = _PLACES[self.code](self.index, num_elements)
        except (ValueError, IndexError) as error:
            raise WireError(f"a tile of code {self.code.name} is damaged: {error}") from error
        fits = len(places) == len(self.values) and (not len(places) or int(places[-1]) < num_elements)
        if not fits or (np.diff(places) <= 0).any():
            raise WireError(f"a tile of code {self.code.name} has places out of order or range")
        return places

    def apply(self, to: Elements) -> None:
        """Write the new values into `to`, the tile's elements. Raises WireError before if it is damaged."""
        if self.code == Code.BITMAP and len(self.index) == -(-len(to) // 8):
            changed = np.unpackbits(self.index, count=len(to)).view(bool)  # faster than by places
            if np.count_nonzero(changed) == len(self.values):
                to[np.flatnonzero(changed)] = self.values  # numpy is many times slower with `changed` itself
                return
        places = self.places(len(to))
        to[slice(None) if self.code == Code.DENSE else places] = self.values


_NO_INDEX = np.empty(0, np.uint8)


def difference(old: Elements, new: Elements) -> Tile:
    """Return the shortest code of the changes from tile `old` to `new`."""
    changed = old != new
    places = np.flatnonzero(changed)
    if len(new) / 8 < len(places) and 4 * np.count_nonzero(changed[1:] > changed[:-1]) > len(new) / 8:
        tile = Tile(Code.BITMAP, np.packbits(changed), new[places])  # as `coded`, and faster
    else:
        tile = coded(places, new[places], len(new))
    return tile if tile.nbytes < new.nbytes else Tile(Code.DENSE, _NO_INDEX, new)


def coded(places: Int64, values: Elements, num_elements: int) -> Tile:
    """Return the shortest code for `values` at `places`, which rise, of a tile of `num_elements`."""
    if not len(places):
        return Tile(Code.NOTHING, _NO_INDEX, values)
    if len(places) == num_elements:
        return Tile(Code.DENSE, _NO_INDEX, values)
    gaps = np.diff(places, prepend=-1) - 1
    num_runs = 1 + int(np.count_nonzero(gaps[1:]))
    sizes = {
        Code.RUNS: 4 * num_runs,
        Code.GAPS: len(places) + int((gaps // _ESCAPE).sum()),
        Code.BITMAP: -(-num_elements // 8),
    }
    code = min(sizes, key=sizes.__getitem__)
    return Tile(code, _INDEX[code](places, gaps, num_elements), values)


def _runs_index(places: Int64, gaps: Int64, _: int) -> Bytes:
    begins = np.flatnonzero(np.concatenate([[True], gaps[1:] > 0]))
    ends = np.append(begins[1:], len(places))
    index: Bytes = np.concatenate([places[begins], ends - begins - 1]).astype("<u2").view(np.uint8)
    return index


def _runs_places(index: Bytes, num_elements: int) -> Int64:
    firsts, lengths = index.view("<u2").astype(np.int64).reshape(2, -1)
    lengths = lengths + 1
    total = int(lengths.sum())
    if total > num_elements:
        raise ValueError(f"{total} places of {num_elements}")
    before = np.cumsum(lengths) - lengths
    places: Int64 = np.arange(total) + np.repeat(firsts - before, lengths)
    return places


def _gaps_index(places: Int64, gaps: Int64, _: int) -> Bytes:
    if gaps.max() < _ESCAPE:
        return gaps.astype(np.uint8)
    ends = np.cumsum(gaps // _ESCAPE + 1)
    index = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    index[ends - 1] = gaps % _ESCAPE
    return index


def _gaps_places(index: Bytes, _: int) -> Int64:
    ends = np.flatnonzero(index != _ESCAPE)
    return np.cumsum(index, dtype=np.int64)[ends] + np.arange(len(ends))


def _bitmap_index(places: Int64, _: Int64, num_elements: int) -> Bytes:
    changed = np.zeros(num_elements, bool)
    changed[places] = True
    return np.packbits(changed)


def _bitmap_places(index: Bytes, num_elements: int) -> Int64:
    if len(index) != -(-num_elements // 8):
        raise ValueError(f"{len(index)} bytes for {num_elements} elements")
    return np.flatnonzero(np.unpackbits(index, count=num_elements))


_INDEX: dict[Code, Callable[[Int64, Int64, int], Bytes]] = {
    Code.RUNS: _runs_index,
    Code.GAPS: _gaps_index,
    Code.BITMAP: _bitmap_index,
}
_PLACES: dict[Code, Callable[[Bytes, int], Int64]] = {
    Code.NOTHING: lambda *_: np.empty(0, np.int64),
    Code.RUNS: _runs_places,
    Code.GAPS: _gaps_places,
    Code.BITMAP: _bitmap_places,
    Code.DENSE: lambda _, num_elements: np.arange(num_elements),
}


def expected_nbytes(num_elements: int, itemsize: int, density: float) -> float:
    """Return the bytes of `num_elements` if each has changed with probability `density`, of 0 to 1."""
    far = (1 - density) ** _ESCAPE  # the probability that a gap needs one more escape
    gap = min(1 + far / (1 - far), 4.0) if far < 1 else 4.0  # a run of one takes four bytes
    per_element = min(min(density * gap, 1 / 8) + density * itemsize, float(itemsize))
    return num_elements * (per_element + 9 / TILE)


def cut(nbytes: int, itemsize: int) -> Sequence[slice]:
    """Cut memory of `nbytes` bytes into tiles of whole elements."""
    step = TILE * itemsize
    return [slice(at, min(at + step, nbytes)) for at in range(0, nbytes, step)]
