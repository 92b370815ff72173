"""Changes from one version of memory to a later version, as bytes to send and to store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.deltas.tiles import Bytes, Code, Elements, Int64, Tile, cut, difference
from weightsync.errors import PlanError, WireError


@dataclass(frozen=True, slots=True)
class Span:
    """A run of memory with elements of one width: `nbytes` bytes from `offset` on.

    `itemsize` is 1, 2, 4 or 8 bytes, and divides `nbytes`.
    """

    offset: int
    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The begin of a delta, with one entry for each tile: little-endian, and unaligned.

    Attributes:
        codes: uint8[n].
        counts: the numbers of values: uint32[n].
        sizes: the bytes of the indexes: uint32[n].
    """

    codes: Bytes
    counts: Elements
    sizes: Elements

    @staticmethod
    def of(data: Bytes, num: int) -> Table:
        """View the table of `num` tiles at the begin of `data`. Raises WireError if `data` is too short."""
        if len(data) < 9 * num:
            raise WireError(f"a delta of {len(data)} bytes is too short for {num} tiles")
        counts, sizes = data[num : 9 * num].view("<u4").reshape(2, num)
        return Table(data[:num], counts, sizes)

    def ends(self, widths: Int64, nbytes: int) -> tuple[Int64, Int64]:
        """Return where each tile's index and values end, in a delta of `nbytes` bytes.

        `widths` are the bytes per element. Raises WireError if a code is unknown, or the sizes do not agree.
        """
        num = len(widths)
        index = np.cumsum(self.sizes, dtype=np.int64) + 9 * num
        values = np.cumsum(self.counts * widths, dtype=np.int64) + (index[-1] if num else 0)
        if (needed := int(values[-1]) if num else 0) != nbytes:
            raise WireError(f"a delta has {nbytes} bytes, not the {needed} that its tiles need")
        if num and (code := int(self.codes.max())) > max(Code):
            raise WireError(f"a tile of a delta has code {code}, of {min(Code)} to {max(Code)}")
        return index, values


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
        widths = np.array(
            [span.itemsize for span in spans for _ in cut(span.nbytes, span.itemsize)], np.int64
        )
        table = Table.of(data, len(widths))
        tiles = []
        columns = (widths, table.codes, table.sizes, table.counts, *table.ends(widths, len(data)))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for width, code, size, count, end, value_end in rows:
            values = data[value_end - count * width : value_end]
            tiles.append(Tile(Code(code), data[end - size : end], _elements(values, width)))
        return Changes(spans, tiles)

    @property
    def nbytes(self) -> int:
        """The bytes that `write` writes."""
        return 9 * len(self._tiles) + sum(tile.nbytes for tile in self._tiles)

    def write(self, to: Bytes) -> None:
        """Write everything to `to`, uint8[nbytes]."""
        table = Table.of(to, len(self._tiles))
        table.codes[:] = [tile.code for tile in self._tiles]
        table.counts[:] = [len(tile.values) for tile in self._tiles]
        table.sizes[:] = [len(tile.index) for tile in self._tiles]
        at = 9 * len(self._tiles)
        for data in [*(tile.index for tile in self._tiles), *(tile.values for tile in self._tiles)]:
            to[at : at + data.nbytes] = data.view(np.uint8)
            at += data.nbytes

    def apply(self, to: Bytes) -> None:
        """Write the values into `to`, which holds the base version. Twice is as once.

        Raises WireError if an index is damaged. Some tiles may have been written then.
        """
        for tile, memory in zip(self._tiles, _cut(self._spans, to), strict=True):
            tile.apply(memory)


def _cut(spans: Sequence[Span], memory: Bytes) -> Iterator[Elements]:
    for span in spans:
        its = memory[span.offset : span.offset + span.nbytes]
        if len(its) != span.nbytes or span.nbytes % span.itemsize:
            raise PlanError("delta", f"{span} does not fit memory of {len(memory)} bytes")
        for part in cut(span.nbytes, span.itemsize):
            yield _elements(its[part], span.itemsize)


def _elements(data: Bytes, width: int) -> Elements:
    return data.view(np.dtype(f"<u{width}"))
