"""What changes from one version of some memory to a later version, as bytes to send and to store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.deltas.tiles import Bytes, Code, Elements, Tile, cut, difference
from weightsync.errors import PlanError, WireError


@dataclass(frozen=True, slots=True)
class Span:
    """A run of memory with elements of one width: `nbytes` bytes from `offset` on.

    `itemsize` is 1, 2, 4 or 8 bytes, and divides `nbytes`.
    """

    offset: int
    nbytes: int
    itemsize: int


class Changes:
    """The changed elements of a version, and their values. The base version is needed to use them.

    As bytes, little-endian: three arrays with one entry for each tile, the code (uint8), the number of
    values (uint32) and the bytes of the index (uint32); then all indexes; then all values.
    """

    def __init__(self, spans: Sequence[Span], tiles: Sequence[Tile]) -> None:
        """`tiles`: one for each tile of the spans, in order."""
        self._spans, self._tiles = spans, tiles

    @staticmethod
    def between(spans: Sequence[Span], old: Bytes, new: Bytes) -> Changes:
        """Compare two versions of the memory, both uint8, one dimension. Ignores bytes outside of `spans`."""
        return Changes(
            spans, [difference(a, b) for a, b in zip(_cut(spans, old), _cut(spans, new), strict=True)]
        )

    @staticmethod
    def decode(spans: Sequence[Span], data: Bytes) -> Changes:
        """Read what `write` wrote for the same spans, as views of `data`.

        Raises WireError if sizes do not agree. Indexes are checked by `apply`.
        """
        widths = [span.itemsize for span in spans for _ in cut(span.nbytes, span.itemsize)]
        num = len(widths)
        if len(data) < 9 * num:
            raise WireError(f"a delta of {len(data)} bytes is too short for {num} tiles")
        codes, counts, sizes = data[:num], _table(data, num, 1), _table(data, num, 5)
        first = 9 * num
        ends = first + np.cumsum(sizes)
        values_at = int(ends[-1]) if num else first
        value_ends = values_at + np.cumsum(counts * np.array(widths, np.int64))
        if (needed := int(value_ends[-1]) if num else first) != len(data):
            raise WireError(f"a delta has {len(data)} bytes, not the {needed} that its tiles need")
        tiles = []
        for width, code, size, end, count, value_end in zip(
            widths,
            codes.tolist(),
            sizes.tolist(),
            ends.tolist(),
            counts.tolist(),
            value_ends.tolist(),
            strict=True,
        ):
            if code not in _CODES:
                raise WireError(f"a tile of a delta has code {code}, of {min(_CODES)} to {max(_CODES)}")
            values = data[value_end - count * width : value_end]
            tiles.append(Tile(Code(code), data[end - size : end], _elements(values, width)))
        return Changes(spans, tiles)

    @property
    def nbytes(self) -> int:
        """The bytes that `write` writes."""
        return 9 * len(self._tiles) + sum(tile.nbytes for tile in self._tiles)

    def write(self, to: Bytes) -> None:
        """Write everything to `to`, uint8[nbytes]."""
        num = len(self._tiles)
        to[:num] = [tile.code for tile in self._tiles]
        _table(to, num, 1)[:] = [len(tile.values) for tile in self._tiles]
        _table(to, num, 5)[:] = [len(tile.index) for tile in self._tiles]
        at = 9 * num
        for data in [*(tile.index for tile in self._tiles), *(tile.values for tile in self._tiles)]:
            to[at : at + data.nbytes] = data.view(np.uint8)
            at += data.nbytes

    def apply(self, to: Bytes) -> None:
        """Write the values into `to`, which holds the base version. Twice is as once.

        Raises WireError if an index is damaged. Some tiles may have been written then.
        """
        for tile, memory in zip(self._tiles, _cut(self._spans, to), strict=True):
            tile.apply(memory)


_CODES = frozenset(Code)


def _cut(spans: Sequence[Span], memory: Bytes) -> Iterator[Elements]:
    for span in spans:
        its = memory[span.offset : span.offset + span.nbytes]
        if len(its) != span.nbytes or span.nbytes % span.itemsize:
            raise PlanError("delta", f"{span} does not fit memory of {len(memory)} bytes")
        for part in cut(span.nbytes, span.itemsize):
            yield _elements(its[part], span.itemsize)


def _elements(data: Bytes, width: int) -> Elements:
    return data.view(np.dtype(f"<u{width}"))


def _table(data: Bytes, num: int, row: int) -> Elements:
    """Return the uint32 per tile that begin after `row` bytes per tile."""
    return data[row * num : (row + 4) * num].view("<u4")
