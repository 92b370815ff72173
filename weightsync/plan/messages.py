"""Reads between hosts: what each trainer packs for one engine rank, in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weightsync.errors import ConfigError
from weightsync.plan.buckets import PIECE_ALIGN, RUN_ALIGN, align, arrange, cut
from weightsync.plan.buffers import Int64
from weightsync.plan.copies import Copies, repeated, tiles
from weightsync.plan.reads import Reads, addresses

__all__ = ["Messages", "messages"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Messages:
    """M messages to one receiver, each from one trainer, ordered by round, then by trainer.

    A round's messages lie side by side in the receive buffer; the next round may overwrite them.

    Attributes:
        round, trainer, offset, nbytes: int64[M]; offset is in the receive buffer, a multiple of 256.
        bounds: int64[M + 1], the first of each message's `reads`.
        reads: what is packed and unpacked, in the messages' order.
        wire: int64[N], where each of the reads starts in its message, without gaps between its rows.
    """

    round: Int64
    trainer: Int64
    offset: Int64
    nbytes: Int64
    bounds: Int64
    reads: Reads
    wire: Int64

    @property
    def num_rounds(self) -> int:
        return int(self.round[-1]) + 1 if len(self.round) else 0

    @property
    def buffer_nbytes(self) -> int:
        """Size of the receive buffer."""
        return int((self.offset + self.nbytes).max(initial=0))

    def of(self, round: int) -> range:
        """The numbers of the messages of one round."""
        return range(*np.searchsorted(self.round, [round, round + 1]).tolist())

    def pack(self, message: int, src_address: Mapping[str, int], wire: int) -> Copies:
        """What the trainer copies to fill `message`, which starts at address `wire` of its memory.

        `src_address` says where each of its buffers starts.
        """
        reads, these = self.reads, slice(*self.bounds[message : message + 2].tolist())
        return Copies(
            addresses(reads.src_names, reads.src_buffer[these], src_address) + reads.src[these],
            wire + self.wire[these],
            reads.rows[these],
            reads.row_nbytes[these],
            reads.src_pitch[these],
            reads.row_nbytes[these],
        )

    def unpack(self, round: int, wire: int, dst_address: Mapping[str, int]) -> Copies:
        """What the receiver copies when a round has arrived in its buffer at address `wire`.

        `dst_address` says where each of its live parameters starts.
        """
        numbers = self.of(round)
        reads, these = self.reads, slice(*self.bounds[[numbers.start, numbers.stop]].tolist())
        offset = np.repeat(self.offset, np.diff(self.bounds))[these]
        return Copies(
            wire + offset + self.wire[these],
            addresses(reads.dst_names, reads.dst_buffer[these], dst_address) + reads.dst[these],
            reads.rows[these],
            reads.row_nbytes[these],
            reads.row_nbytes[these],
            reads.dst_pitch[these],
        )


def messages(reads: Reads, max_nbytes: int) -> Messages:
    """Deals `reads` to rounds, in their order, so that the receive buffer never exceeds `max_nbytes`.

    Raises:
        ConfigError: `max_nbytes` is less than 256.
    """
    capacity = max_nbytes // RUN_ALIGN * RUN_ALIGN
    if not capacity:
        raise ConfigError("sync.max_staging_bytes", max_nbytes, f"give at least {RUN_ALIGN}")
    table, part = tiles(Copies(*reads.table().T), capacity)
    nbytes = table[:, 2] * table[:, 3]
    trainer = reads.trainer[part].astype(np.int64)
    runs = arrange(
        cut(np.arange(len(table)), nbytes, capacity),
        trainer,
        nbytes,
        np.arange(int(trainer.max(initial=-1)) + 1),
    )
    sizes = align(nbytes[runs.order], PIECE_ALIGN)
    start = np.cumsum(sizes) - sizes
    message, _ = repeated(np.diff(runs.bounds))
    return Messages(
        round=runs.bucket,
        trainer=runs.trainer,
        offset=runs.offset,
        nbytes=runs.nbytes,
        bounds=runs.bounds,
        reads=reads.cut(part[runs.order], table[runs.order]),
        wire=start - start[runs.bounds[:-1]][message],
    )
