"""An engine rank's reads out of the trainers' memory: a kernel for most, copy engines for large blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weightsync import cuda
from weightsync.device_memory import DeviceHandle, PeerMemory
from weightsync.kernels import CopyTable
from weightsync.modules import device_id
from weightsync.plan import Reads
from weightsync.plan.copies import Copies, blocks

__all__ = ["NUM_BLOCKS", "Pull"]

NUM_BLOCKS = 264
"""Thread blocks of the kernel, which has the device for itself."""
_BLOCK_NBYTES = 4 << 20
"""What is contiguous, at least as long and on another GPU goes by a copy engine."""


class Pull:
    """Made once a connection, on the current device; `begin` is all that an update does."""

    def __init__(
        self,
        reads: Reads,
        memory: Mapping[tuple[int, str], DeviceHandle],
        address: Mapping[str, int],
    ) -> None:
        """
        Args:
            memory: the trainers' buffers, by rank and name.
            address: where the engine rank's buffers start, on the current device.

        Raises:
            TransportError: a trainer's memory cannot be mapped.
        """
        self._memory: list[PeerMemory] = []
        start: dict[tuple[int, str], int] = {}
        try:
            for key, handle in memory.items():
                self._memory.append(PeerMemory(handle))
                start[key] = self._memory[-1].address
        except BaseException:
            self.close()
            raise
        here = device_id(torch.device("cuda", torch.cuda.current_device()))
        far = reads.among({key for key, handle in memory.items() if handle.device != here})
        self._blocks, rest = blocks(reads.copies(start, address), far, _BLOCK_NBYTES)
        self._kernel = CopyTable(rest, (0, len(rest)), NUM_BLOCKS)
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._touch(list(start.values()))

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Copy everything; asynchronous, ordered on `stream`."""
        self._beside.wait_event(stream.record_event())
        self._kernel.launch(0, stream)
        for source, target, _, nbytes, _, _ in self._blocks:
            cuda.copy(source, target, nbytes, self._beside)
        stream.wait_event(self._beside.record_event())

    def close(self) -> None:
        """Let go of the trainers' memory. Nothing may still be reading it."""
        while self._memory:
            self._memory.pop().close()

    def _touch(self, starts: list[int]) -> None:
        """Read from each mapping once, so that no update pays its first use."""
        scratch = torch.empty(len(starts), dtype=torch.uint8, device="cuda")
        copies = [(start, scratch.data_ptr() + i, 1, 1, 1, 1) for i, start in enumerate(starts)]
        CopyTable(Copies.of(copies), (0, len(copies))).launch(0, self._beside)
        for start, *_ in copies:
            cuda.copy(start, scratch.data_ptr(), 1, self._beside)
        self._beside.synchronize()
