"""Device memory that one process owns and its neighbours on the same GPU map through CUDA IPC."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch

from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.memory.host import SharedBuffer
from weightsync.memory.tensors import device_id
from weightsync.protocol.handles import DeviceHandle, Handle

__all__ = ["Buffer", "DeviceBuffer", "PeerMemory", "export_tensor", "open_buffer"]

_GRANULE = 2 << 20


class DeviceBuffer:
    """Memory of the current device, seen as a uint8 tensor of shape ``[nbytes]``.

    Do not count on a mapping to keep it once the process that created it has ended.
    """

    def __init__(self, handle: DeviceHandle, address: int, *, owned: bool) -> None:
        self.handle = handle
        self.tensor = cuda.view(address, handle.nbytes)
        self._address = address
        self._owned = owned
        self._closed = False

    @classmethod
    def create(cls, nbytes: int) -> DeviceBuffer:
        """New memory, not cleared. Raises TransportError when the device has not that much left."""
        # CUDA carves small allocations out of larger ones and would share the neighbours too.
        address = cuda.malloc(max(1, -(-nbytes // _GRANULE)) * _GRANULE)
        ipc, offset = cuda.export(address)
        return cls(DeviceHandle(_current_device(), os.getpid(), ipc, offset, nbytes), address, owned=True)

    @classmethod
    def open(cls, handle: DeviceHandle) -> DeviceBuffer:
        """Map a neighbour's memory. Raises TransportError where its GPU is not ours, or it is gone."""
        device = _current_device()
        if handle.device != device:
            raise TransportError(
                f"process {handle.pid} has its memory on {handle.device}, this one is on {device}: "
                "both must be on the same GPU"
            )
        return cls(handle, cuda.open_handle(handle.ipc) + handle.offset, owned=False)

    def close(self) -> None:
        """Give the memory back, or the view of it; twice is safe. Nothing may still be using it."""
        if self._closed:
            return
        self._closed = True
        self.tensor = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        with torch.cuda.device(self.tensor.device):
            if self._owned:
                cuda.free(self._address)
            else:
                cuda.close_handle(self.handle.ipc)


class PeerMemory:
    """Another process's memory on any GPU of this host, to be read and written by our GPU's kernels."""

    def __init__(self, handle: DeviceHandle) -> None:
        """Raises TransportError where our GPU does not reach its, or the process is gone."""
        self._handle, self._device = handle, torch.cuda.current_device()
        self.address = cuda.open_handle(handle.ipc) + handle.offset

    def close(self) -> None:
        """Unmap it, once. Nothing may still be using it."""
        with torch.cuda.device(self._device):
            cuda.close_handle(self._handle.ipc)


def export_tensor(tensor: torch.Tensor) -> DeviceHandle:
    """A CUDA tensor's memory, from its first element to its last; strided ones with what lies between.

    It stays the tensor's: whoever exports keeps the tensor alive while others use the memory.

    Raises:
        TransportError: PyTorch took the memory from where it cannot be exported; says what to set.
    """
    with torch.cuda.device(tensor.device):
        ipc, offset = cuda.export(tensor.data_ptr())
    return DeviceHandle(device_id(tensor.device), os.getpid(), ipc, offset, _extent_nbytes(tensor))


def _extent_nbytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _current_device() -> str:
    return device_id(torch.device("cuda", torch.cuda.current_device()))


Buffer: TypeAlias = SharedBuffer | DeviceBuffer


def open_buffer(handle: Handle) -> Buffer:
    """Map a neighbour's buffer. Raises PeerLostError or TransportError when that cannot be."""
    return DeviceBuffer.open(handle) if isinstance(handle, DeviceHandle) else SharedBuffer.open(handle)
