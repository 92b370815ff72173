"""Writes buckets that are in host memory to live parameters on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.channel.sink import PieceView
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.plan import Plan, RankLayout
from weightsync.protocol.messages import Digests, HolderDigests


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
        self._writer = LiveWriter(plan, layout, live, [bucket] * len(slots))

    def begin(self, live: Mapping[str, torch.Tensor] | None) -> None:
        """Start a load, as `LiveWriter.begin`."""
        self._writer.begin(live)

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

    def written(self, by_holder: HolderDigests | None = None) -> None:
        """Note that all further buckets are in memory."""
        self._writer.written(by_holder)

    def finish(self) -> None:
        """Check that every bucket came, as `LiveWriter.finish`."""
        self._writer.finish()

    def digests(self) -> Digests:
        """Return the digests of live memory."""
        return self._writer.digests()
