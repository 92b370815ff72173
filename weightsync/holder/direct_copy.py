"""Direct copies from the trainers' memory into an engine rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.errors import TransportError
from weightsync.memory.device import PeerMemory
from weightsync.memory.kernels import CopyTable
from weightsync.plan import Reads
from weightsync.plan.copies import Copies
from weightsync.protocol.handles import DeviceHandle

NUM_BLOCKS = 264
"""Thread blocks of the kernel. It has the device to itself, since the engine is paused.

Copy engines are 6 % faster for blocks of 64 MiB and more, and slower for all others: `benchmarks.bench_pull`.
"""


class DirectCopy:
    """The direct copies of one engine rank, made once per connect. Uses the current device."""

    def __init__(
        self,
        reads: Sequence[Reads],
        memory: Mapping[tuple[int, str], DeviceHandle],
        address: Mapping[str, int],
    ) -> None:
        """
        Args:
            reads: those of tensors that change and, if they are kept apart, those of frozen ones.
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
            self._kernels = [
                CopyTable(part.copies(start, address), (0, len(part)), NUM_BLOCKS) if len(part) else None
                for part in reads
            ]
            _touch(list(start.values()))
        except BaseException:
            self.close()
            raise

    def begin(self, stream: torch.cuda.Stream, frozen: bool) -> None:
        """Start the copies on `stream`, those of frozen tensors if `frozen`, without waiting for them."""
        for kernel in self._kernels if frozen else self._kernels[:1]:
            if kernel:
                kernel.launch(0, stream)

    def close(self) -> None:
        """Unmap the trainers' memory. No copy may be running."""
        while self._memory:
            self._memory.pop().close()


def try_mapping(memory: Mapping[str, DeviceHandle]) -> str:
    """Map each handle on the current device, read a byte and unmap it.

    Returns the name of the first that fails, with the reason, or "".
    """
    for name, handle in memory.items():
        try:
            mapped = PeerMemory(handle)
            try:
                _touch([mapped.address])
            finally:
                mapped.close()
        except TransportError as error:
            return f"{name}: {error}"
    return ""


def _touch(starts: list[int]) -> None:
    """Read one byte of each mapping: its first use takes time."""
    scratch = torch.empty(len(starts), dtype=torch.uint8, device="cuda")
    copies = [(start, scratch.data_ptr() + i, 1, 1, 1, 1) for i, start in enumerate(starts)]
    stream = torch.cuda.current_stream()
    CopyTable(Copies.of(copies), (0, len(copies))).launch(0, stream)
    stream.synchronize()
