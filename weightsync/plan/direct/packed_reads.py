"""Compact wire encoding of `Reads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from weightsync.plan.direct.direct import Reads
from weightsync.plan.layout.column import Column, narrowed
from weightsync.plan.layout.copies import Copies
from weightsync.plan.layout.layout import Int64, columns

_DST = ("dst", "dst_buffer")


@dataclass(frozen=True, slots=True, eq=False)
class PackedReads:
    """N reads without the names of the trainers' buffers, which all members know.

    Attributes:
        num_reads: N.
        columns: the columns of `Reads` by name. A column of length 1 stands for N equal numbers.
        dst_names: as in `Reads`.
    """

    num_reads: int
    columns: Mapping[str, Column]
    dst_names: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Reads, Int64]], *, to_send: bool = False) -> PackedReads:
        """Pack rows of some reads, one part after the other.

        With `to_send`, leave out where they are written.
        """
        packed, first = {}, parts[0][0]
        for name in columns(first):
            wide = np.concatenate([getattr(reads, name)[rows] for reads, rows in parts])
            if to_send and name in _DST:
                wide = wide[:1] * 0
            packed[name] = narrowed(wide[:1] if (wide == wide[:1]).all() else wide)
        return cls(sum(len(rows) for _, rows in parts), packed, () if to_send else first.dst_names)

    def reads(self, src_names: tuple[str, ...]) -> Reads:
        """Return the reads. Columns that were left out are 0."""
        wide = {name: np.broadcast_to(column, self.num_reads) for name, column in self.columns.items()}
        return Reads(
            *(wide[field.name].astype(np.int64) for field in fields(Copies)),
            trainer=wide["trainer"].astype(np.int32),
            src_names=src_names,
            src_buffer=wide["src_buffer"].astype(np.int32),
            dst_names=self.dst_names,
            dst_buffer=wide["dst_buffer"].astype(np.int32),
        )
