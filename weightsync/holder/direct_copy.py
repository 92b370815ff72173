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

    If the copies write all the rank's tensors, the memory is digested as it is written, see `WrittenDigests`.
    The rank itself could only begin after the last copy, and would read all tensors from the GPU's memory.
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
            segments: the engine rank's segments for each tensor of the plan.
            reads: the reads of changing tensors and, if these are separate, the reads of frozen tensors.
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
        """Start the copies on `stream` without waiting for them, frozen tensors only if `frozen`.

        Returns this object if it digests all tensors that the rank then has, else None.
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
    """Return True if the reads cover all bytes of the engine rank."""
    held = sum(
        segment.box.numel * meta.itemsize
        for meta, its in zip(plan.tensors, segments, strict=True)
        for segment in its
    )
    return sum(part.nbytes for part in reads) == held
