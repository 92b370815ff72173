"""What one engine rank reads from the trainers, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightsync.plan.buffers import Int32, Int64
from weightsync.plan.copies import Copies

__all__ = ["Reads", "addresses"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reads:
    """N 2-D copies out of the trainers' memories, in the order in which they run.

    Attributes:
        trainer: int32[N], the rank that is read.
        src_buffer: int32[N], index into `src_names`; src: int64[N], byte offset in that buffer.
        dst_buffer: int32[N], index into `dst_names`; dst: int64[N], byte offset in that buffer.
        rows, row_nbytes, src_pitch, dst_pitch: int64[N], as in `Copies`.
    """

    trainer: Int32
    src_names: tuple[str, ...]
    src_buffer: Int32
    src: Int64
    dst_names: tuple[str, ...]
    dst_buffer: Int32
    dst: Int64
    rows: Int64
    row_nbytes: Int64
    src_pitch: Int64
    dst_pitch: Int64

    @classmethod
    def of(
        cls,
        trainer: Int64 | Int32,
        src_names: tuple[str, ...],
        src_buffer: Int64 | Int32,
        dst_names: tuple[str, ...],
        dst_buffer: Int64 | Int32,
        table: Int64,
    ) -> Reads:
        """Reads from a table as `table()` gives it."""
        src, dst, rows, row_nbytes, src_pitch, dst_pitch = table.T
        return cls(
            trainer=trainer.astype(np.int32),
            src_names=src_names,
            src_buffer=src_buffer.astype(np.int32),
            src=src,
            dst_names=dst_names,
            dst_buffer=dst_buffer.astype(np.int32),
            dst=dst,
            rows=rows,
            row_nbytes=row_nbytes,
            src_pitch=src_pitch,
            dst_pitch=dst_pitch,
        )

    def __len__(self) -> int:
        return len(self.trainer)

    @property
    def nbytes(self) -> int:
        return int((self.rows * self.row_nbytes).sum())

    def by_trainer(self) -> dict[int, int]:
        """Bytes read from each trainer rank that is read from."""
        ranks, index = np.unique(self.trainer, return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, index, self.rows * self.row_nbytes)
        return dict(zip(ranks.tolist(), sums.tolist(), strict=True))

    def table(self) -> Int64:
        """int64[N, 6], `Copies`' columns; `src` and `dst` are offsets in the buffers."""
        return np.stack(self._columns(), axis=1)

    def take(self, rows: Int64) -> Reads:
        """Those of numbers `rows`, in that order."""
        return Reads.of(
            self.trainer[rows],
            self.src_names,
            self.src_buffer[rows],
            self.dst_names,
            self.dst_buffer[rows],
            np.stack([column[rows] for column in self._columns()], axis=1),
        )

    def cut(self, part: Int64, table: Int64) -> Reads:
        """`table` with parts of these reads: row i is part of number `part[i]`."""
        return Reads.of(
            self.trainer[part],
            self.src_names,
            self.src_buffer[part],
            self.dst_names,
            self.dst_buffer[part],
            table,
        )

    def copies(self, src_address: Mapping[tuple[int, str], int], dst_address: Mapping[str, int]) -> Copies:
        """The copies between addresses.

        Args:
            src_address: where each (trainer rank, buffer) starts, as seen by who copies.
            dst_address: where each of the engine rank's own buffers starts.
        """
        key = self.trainer.astype(np.int64) * len(self.src_names) + self.src_buffer
        numbers, index = np.unique(key, return_inverse=True)
        starts = [
            src_address[trainer, self.src_names[buffer]]
            for trainer, buffer in (divmod(number, len(self.src_names)) for number in numbers.tolist())
        ]
        return Copies(
            np.array(starts, np.int64)[index] + self.src,
            addresses(self.dst_names, self.dst_buffer, dst_address) + self.dst,
            self.rows,
            self.row_nbytes,
            self.src_pitch,
            self.dst_pitch,
        )

    def _columns(self) -> tuple[Int64, ...]:
        return self.src, self.dst, self.rows, self.row_nbytes, self.src_pitch, self.dst_pitch


def addresses(names: tuple[str, ...], buffer: Int32, address: Mapping[str, int]) -> Int64:
    """The address of each `buffer`, a number in `names`."""
    numbers, index = np.unique(buffer, return_inverse=True)
    starts = np.array([address[names[number]] for number in numbers.tolist()], np.int64)
    found: Int64 = starts[index]
    return found
