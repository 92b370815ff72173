"""Trainers' memory on this host, mapped to be read by kernels of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.errors import TransportError
from weightsync.memory.cuda import view
from weightsync.memory.device import PeerMemory
from weightsync.memory.kernels.device_kernels import CopyTable
from weightsync.plan.layout.copies import Copies
from weightsync.protocol.handles import DeviceHandle


class MappedTrainers:
    """Mapped buffers of trainers. Uses the current device.

    Attributes:
        starts: the address of each buffer, by the trainer's rank and the buffer's name.
    """

    def __init__(self, memory: Mapping[tuple[int, str], DeviceHandle]) -> None:
        """Map `memory`, each allocation once. Raises TransportError if a buffer cannot be."""
        self._memory: list[PeerMemory] = []
        self.starts: dict[tuple[int, str], int] = {}
        self._handles = memory
        bases: dict[bytes, int] = {}
        try:
            for key, handle in memory.items():
                if handle.ipc not in bases:
                    self._memory.append(mapped := PeerMemory(handle))
                    bases[handle.ipc] = mapped.address - handle.offset
                self.starts[key] = bases[handle.ipc] + handle.offset
        except BaseException:
            self.close()
            raise

    def rest(self, key: tuple[int, str], offset: int) -> torch.Tensor:
        """View a buffer on the current device from `offset` on: uint8, one dimension."""
        return view(self.starts[key] + offset, self._handles[key].nbytes - offset)

    def touch(self) -> None:
        """Read a byte of each buffer, since the first use of a mapping takes time."""
        touch(list(self.starts.values()))

    def close(self) -> None:
        """Unmap them. No copy may be running."""
        while self._memory:
            self._memory.pop().close()


def try_mapping(memory: Mapping[str, DeviceHandle]) -> str:
    """Map each handle on the current device, read a byte and unmap it.

    Returns the name of the first that fails, with the reason, or "".
    """
    for name, handle in memory.items():
        try:
            mapped = MappedTrainers({(0, name): handle})
            try:
                mapped.touch()
            finally:
                mapped.close()
        except TransportError as error:
            return f"{name}: {error}"
    return ""


def touch(starts: Sequence[int]) -> None:
    """Read the byte at each address with a kernel of the current device."""
    scratch = torch.empty(len(starts), dtype=torch.uint8, device="cuda")
    copies = [(start, scratch.data_ptr() + i, 1, 1, 1, 1) for i, start in enumerate(starts)]
    stream = torch.cuda.current_stream()
    CopyTable(Copies.of(copies), (0, len(copies))).launch(0, stream)
    stream.synchronize()
