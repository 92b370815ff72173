"""Direct copies from the trainers' memory into an engine rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.holder.mapped_trainers import MappedTrainers
from weightsync.memory.kernels.device_kernels import CopyTable, WrittenDigests
from weightsync.memory.kernels.digests import segment_parts
from weightsync.plan import Plan, Reads, Segment
from weightsync.protocol.handles import DeviceHandle
from weightsync.protocol.messages import HolderDigests


class DirectCopy:
    """The direct copies of one engine rank, made once per connect. Uses the current device.

    If they are all that the rank holds, its memory is digested as it is written, see `WrittenDigests`. The
    rank itself could only begin after the last copy, and would read all of it from the GPU's memory.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Segment]],
        reads: Sequence[Reads],
        memory: Mapping[tuple[int, str], DeviceHandle],
        address: Mapping[str, int],
    ) -> None:
        """
        Args:
            segments: the engine rank's, for each tensor of the plan.
            reads: those of tensors that change and, if they are kept apart, those of frozen ones.
            memory: the trainers' buffers, by rank and name.
            address: where the engine rank's buffers start, on the current device.

        Raises:
            TransportError: a trainer's memory cannot be mapped.
        """
        self._trainers = MappedTrainers(memory)
        try:
            changing, *frozen = [part.copies(self._trainers.starts, address) for part in reads]
            self._frozen = [CopyTable(copies, [0, len(copies)]) for copies in frozen]
            self._changing: CopyTable | WrittenDigests
            if _write_all(plan, segments, reads):
                parts = segment_parts(plan, segments, address)
                self._changing = WrittenDigests(changing, parts, len(plan.tensors))
            else:
                self._changing = CopyTable(changing, [0, len(changing)])
            self._trainers.touch()
        except BaseException:
            self.close()
            raise

    def begin(self, stream: torch.cuda.Stream, frozen: bool) -> DirectCopy | None:
        """Start the copies on `stream`, those of frozen tensors if `frozen`, without waiting for them.

        Returns itself if it digests all that the rank then holds.
        """
        for copies in self._frozen if frozen else ():
            copies.launch(0, stream)
        if isinstance(self._changing, CopyTable):
            self._changing.launch(0, stream)
            return None
        self._changing.launch(stream)
        return self

    def result(self) -> HolderDigests:
        """Return the digests after `stream` of `begin` was waited for."""
        assert isinstance(self._changing, WrittenDigests)
        return HolderDigests.of_live(self._changing.result())

    def close(self) -> None:
        """Unmap the trainers' memory. No copy may be running."""
        self._trainers.close()


def _write_all(plan: Plan, segments: Sequence[Sequence[Segment]], reads: Sequence[Reads]) -> bool:
    """Whether the reads are all that the engine rank holds."""
    held = sum(
        segment.box.numel * meta.itemsize
        for meta, its in zip(plan.tensors, segments, strict=True)
        for segment in its
    )
    return sum(part.nbytes for part in reads) == held
