"""Writes buckets that are in host memory to live parameters on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.plan import Plan, RankLayout


class DeviceSink:
    """A Sink that copies whole buckets to the device, where one kernel writes all pieces.

    The tensors of an adapter are many and small. If they were copied one by one, each copy and each digest
    would wait for the device.
    """

    def __init__(
        self,
        plan: Plan,
        layout: RankLayout,
        live: Mapping[str, torch.Tensor],
        slots: Sequence[torch.Tensor],
        bucket: torch.Tensor,
    ) -> None:
        """Prepare the kernels' tables.

        Args:
            plan, layout, live: as in `LiveWriter`.
            slots: the holder's bucket slots, in host memory.
            bucket: memory on the device, of a slot's size or more. Several sinks may take turns with it.
        """
        self._plan, self._slots, self._bucket = plan, slots, bucket
        self._writer = writer = LiveWriter(plan, layout, live, [bucket] * len(slots))
        self.begin, self.written = writer.begin, writer.written
        self.finish, self.digests = writer.finish, writer.digests

    def take(self, bucket: int, pieces: Sequence[PieceView]) -> None:
        """Copy one bucket to the device, then into the live parameters."""
        slot = self._slots[bucket % len(self._slots)]
        placed = self._plan.bucket(bucket).pieces
        ends = [piece.offset + piece.nbytes for piece in placed]
        starts = [slot.data_ptr() + piece.offset for piece in placed]
        if starts == [data.data_ptr() for _, _, data in pieces]:
            self._bucket[: max(ends)].copy_(slot[: max(ends)])
        else:  # some are in the send buffer of the holder's own trainer
            for piece, (_, _, data) in zip(placed, pieces, strict=True):
                held = data.reshape(-1).view(torch.uint8)
                self._bucket[piece.offset : piece.offset + piece.nbytes].copy_(held)
        torch.cuda.current_stream().synchronize()  # the kernel runs on another stream
        self._writer.take(bucket, pieces)
