"""Device memory that one process owns and others map through CUDA IPC."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeAlias

import torch

from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.memory.host import SharedBuffer
from weightsync.memory.tensors import device_id, extent_nbytes
from weightsync.protocol.collector import collector_paused
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.device_memory import DeviceMemory
from weightsync.protocol.handles import DeviceHandle

_GRANULE = 2 << 20


class DeviceBuffer:
    """Memory of the current device as a uint8 tensor of shape ``[nbytes]``.

    A mapping may become invalid when the process that created the memory ends.
    """

    def __init__(self, handle: DeviceHandle, address: int, *, owned: bool) -> None:
        self.handle = handle
        self.tensor = cuda.view(address, handle.nbytes)
        self._address = address
        self._owned = owned
        self._closed = False

    @classmethod
    def create(cls, nbytes: int) -> DeviceBuffer:
        """Allocate memory, not cleared. Raises TransportError if the device has too little."""
        # CUDA puts small allocations into one larger block and would export the whole block.
        address = cuda.malloc(max(1, -(-nbytes // _GRANULE)) * _GRANULE)
        ipc, offset = cuda.export([address])[address]
        return cls(DeviceHandle(_current_device(), os.getpid(), ipc, offset, nbytes), address, owned=True)

    @classmethod
    def open(cls, handle: DeviceHandle) -> DeviceBuffer:
        """Map another process's memory. Raises TransportError if it is on another GPU or gone."""
        _require_here(handle.device, handle.pid)
        return cls(handle, cuda.open_handle(handle.ipc) + handle.offset, owned=False)

    def close(self) -> None:
        """Free or unmap the memory, which must not be in use. Safe to call twice."""
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
    """Another process's memory on any GPU of this host. Kernels of the current device use it."""

    def __init__(self, handle: DeviceHandle) -> None:
        """Raises TransportError if the current device cannot reach the memory, or the process is gone."""
        self._handle, self._device = handle, torch.cuda.current_device()
        self.address = cuda.open_handle(handle.ipc) + handle.offset

    def close(self) -> None:
        """Unmap the memory, which must not be in use. Call it once."""
        with torch.cuda.device(self._device):
            cuda.close_handle(self._handle.ipc)


@collector_paused
def export_tensors(tensors: Mapping[str, torch.Tensor]) -> DeviceMemory:
    """Export the memory of one GPU's tensors, from first to last element, gaps included.

    Empty tensors are left out. The caller keeps the tensors alive while other processes use the memory.

    Raises:
        TransportError: PyTorch's allocator uses memory that cannot be exported. Names the setting to change.
    """
    held = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not held:
        return DeviceMemory.of({})
    gpu = next(iter(held.values())).device
    addresses = [tensor.data_ptr() for tensor in held.values()]
    with torch.cuda.device(gpu):
        exported = cuda.export(addresses)
    places, nbytes = [exported[address] for address in addresses], map(extent_nbytes, held.values())
    return DeviceMemory.of_process(device_id(gpu), os.getpid(), held, places, nbytes)


class MappedTensors(Mapping[str, torch.Tensor]):
    """Buffers of other processes by name: uint8[nbytes].

    An allocation is mapped at the first use of a buffer in it, so that a refill maps while it copies. Tensors
    are made on demand, since most copies only need addresses.

    Attributes:
        memory: the handles.
        nbytes: the bytes of each buffer.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        """Raises TransportError if a buffer is on another GPU than this process."""
        for device, pid in memory.owners:
            _require_here(device, pid)
        self.memory = memory
        self._handles = [ipc for _, _, ipc in memory.allocations()]
        self._places, self.nbytes = dict[str, tuple[int, int]](), dict[str, int]()
        self._ends = [0] * len(self._handles)
        for name, number, offset, nbytes in memory.places():
            self._places[name], self.nbytes[name] = (number, offset), nbytes
            self._ends[number] = max(self._ends[number], offset + nbytes)
        self._device, self._mapping = torch.cuda.current_device(), threading.Lock()
        self._starts, self._views = dict[int, int](), dict[int, torch.Tensor]()
        self._ahead: Future[None] | None = None
        self._closing = False

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a buffer. Raises TransportError if the buffer's process is gone."""
        number, offset = self._places[name]
        if number not in self._views:
            self._views[number] = cuda.view(self._start(number), self._ends[number])
        return self._views[number][offset : offset + self.nbytes[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def address(self, name: str) -> int:
        """Return a buffer's address on the current device. Raises TransportError if the process is gone."""
        number, offset = self._places[name]
        return self._start(number) + offset

    def addresses(self) -> dict[str, int]:
        """Return the addresses of all buffers. Raises the errors of `address`."""
        starts = [*map(self._start, range(len(self._handles)))]
        return {name: starts[number] + offset for name, (number, offset) in self._places.items()}

    def map_ahead(self) -> None:
        """Start to map all allocations on another thread. Uses wait for it, and raise its errors."""
        self._ahead = on_daemon(self._map_all, "weightsync-mapping")

    def close(self) -> None:
        """Unmap the memory, which must not be in use, and forget the buffers. Safe to call twice."""
        self._closing = True
        self._wait_mapped()
        self._places, self._views = {}, {}
        with torch.cuda.device(self._device), self._mapping:
            while self._starts:
                cuda.close_handle(self._handles[self._starts.popitem()[0]])

    def _start(self, number: int) -> int:
        with self._mapping:
            self._wait_mapped()
            return self._mapped(number)

    def _map_all(self) -> None:
        with torch.cuda.device(self._device), suppress(TransportError):  # users try again, and get the error
            for number in range(len(self._handles)):
                if not self._closing:
                    self._mapped(number)

    def _wait_mapped(self) -> None:
        if self._ahead:  # mapping and copying at once takes longer than in turn
            wait([self._ahead])
            self._ahead = None

    def _mapped(self, number: int) -> int:
        if number not in self._starts:
            self._starts[number] = cuda.open_handle(self._handles[number])
        return self._starts[number]


def _require_here(device: str, pid: int) -> None:
    if device != (here := _current_device()):
        raise TransportError(
            f"process {pid} has memory on {device}, this process is on {here}: both must be on the same GPU"
        )


def _current_device() -> str:
    return device_id(torch.device("cuda", torch.cuda.current_device()))


Buffer: TypeAlias = SharedBuffer | DeviceBuffer
