"""Where a holder copies a part that others hold."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.holder.snapshots import HEADER_NBYTES
from weightsync.memory.host import SharedBuffer
from weightsync.plan.broadcast.portions import Portion

STEP_NBYTES = 16 << 20
"""Bytes of one read. Each read has a deadline, and after a failed read another source continues."""


class PartSink:
    """Writes a part into memory that others read, behind the header.

    This is a `RefillSink` without an engine rank.
    """

    def __init__(self, part: int, buffer: SharedBuffer) -> None:
        self._part, self.targets = part, (buffer,)
        self._nbytes = buffer.handle.nbytes - HEADER_NBYTES

    @property
    def num_buckets(self) -> int:
        return -(-self._nbytes // STEP_NBYTES)

    def portions(self, bucket: int) -> Sequence[Portion]:
        first = bucket * STEP_NBYTES
        nbytes = min(STEP_NBYTES, self._nbytes - first)
        return [Portion(self._part, first, HEADER_NBYTES + first, nbytes)]

    def wait_free(self, bucket: int) -> None:
        """Do nothing: no two buckets share a place."""

    def land(self, bucket: int) -> None:
        """Do nothing: the target is where it stays."""

    def finish(self) -> None: ...
