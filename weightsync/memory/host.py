"""Host memory that one process fills and its neighbours on the same host map."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightsync.errors import PeerLostError, TransportError
from weightsync.protocol.handles import BufferHandle

__all__ = ["SharedBuffer", "map_pages", "num_threads", "open_memory"]

_madvise = ctypes.CDLL(None).madvise  # unlike mmap's own it lets other threads run
POPULATE_READ, POPULATE_WRITE = 22, 23  # since Linux 5.14
PART_NBYTES = 256 << 20
"""What one thread touches at a time."""


class SharedBuffer:
    """A memory file (memfd), or a file that lies in memory, mapped once and seen as a uint8 tensor.

    A memfd has no name in any file system, so nothing is left when its last process ends, however it
    ends. `tensor` has shape ``[nbytes]``. Where CUDA is present a memfd is page-locked for the process that
    made it, and for others once they `pin` it, so that copies to and from a device run at link speed.
    """

    def __init__(self, fd: int, handle: BufferHandle, *, is_new: bool = False, touch: bool = True) -> None:
        self.handle = handle
        self._fd, self._pinned = fd, False
        # Touching pages for the first time is many times slower than writing them: never in an update.
        may = mmap.PROT_READ if handle.is_file else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if touch and not is_new else 0)
        view = mmap.mmap(fd, max(handle.nbytes, 1), flags=flags, prot=may)
        memory = _writable(view) if handle.is_file else view
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[: handle.nbytes]
        if is_new:
            _touch(self.tensor)

    @classmethod
    def create(cls, nbytes: int) -> SharedBuffer:
        """A new zeroed buffer. Raises TransportError when the host has not that much memory."""
        # Asked beforehand: taking more than there is ends processes, and not always this one.
        available = _available_nbytes()
        if nbytes > available:
            raise TransportError(
                f"cannot take {nbytes} bytes of shared memory: the host has {available} left"
            )
        name = f"weightsync-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        buffer = cls(fd, BufferHandle(os.getpid(), fd, name, nbytes), is_new=True)
        buffer.pin()
        return buffer

    @classmethod
    def open(cls, handle: BufferHandle, *, touch: bool = True) -> SharedBuffer:
        """Map a neighbour's buffer. Raises PeerLostError when its process is gone.

        Without `touch`, pages are mapped by `map_pages`, or when they are used.
        """
        fd = open_memory(handle, os.O_RDONLY if handle.is_file else os.O_RDWR)
        return cls(fd, handle, touch=touch)

    @classmethod
    def of_file(cls, path: Path) -> SharedBuffer:
        """A file that lies in memory, as it is. Whoever writes to `tensor` ends this process."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        name = os.readlink(f"/proc/self/fd/{fd}")
        return cls(fd, BufferHandle(os.getpid(), fd, name, os.fstat(fd).st_size, is_file=True), touch=False)

    def fileno(self) -> int:
        """The descriptor of the memory, for a child that maps it too."""
        return self._fd

    def close(self) -> None:
        """Drop this process's view. The memory goes with the last view of any process."""
        if self._fd >= 0:
            self._unpin()
            os.close(self._fd)
            self._fd = -1
            self.tensor = self.tensor[:0].clone()

    def pin(self) -> None:
        """Lock its pages, for this process's copies to and from a device, where there is one."""
        if torch.cuda.is_available() and self.handle.nbytes and not self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(
                int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.handle.nbytes, 0))
            )
            self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostUnregister(self.tensor.data_ptr())))


def open_memory(handle: BufferHandle, flags: int) -> int:
    """A descriptor of a neighbour's memory, with `flags` as of `os.open`.

    Raises PeerLostError when its process is gone, or may not be looked into (then from a PermissionError).
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        # A pid is used again after its process ended; the random name is not.
        if os.readlink(path).removesuffix(" (deleted)") != handle.link:
            raise PeerLostError(f"process {handle.pid}", "its shared memory belongs to another process now")
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLostError(
            f"process {handle.pid}", f"its shared memory cannot be opened: {error}"
        ) from error


def num_threads(most: int) -> int:
    """`most`, and no more than this process may run at once."""
    return min(most, len(os.sched_getaffinity(0)))


def map_pages(part: torch.Tensor) -> None:
    """Map the pages of `part`, uint8[n] of a neighbour's memory, before it is read.

    Reading maps them too, a few at a time, and is slower for it; before Linux 5.14 that is left to it.
    """
    _advise(POPULATE_READ, part)


def _touch(tensor: torch.Tensor) -> None:
    """All pages of new memory that is zero, by several threads: the kernel clears 5 GB/s for one."""
    parts = (tensor[at : at + PART_NBYTES] for at in range(0, len(tensor), PART_NBYTES))
    with ThreadPoolExecutor(num_threads(8)) as threads:
        if any(threads.map(partial(_advise, POPULATE_WRITE), parts)):
            tensor.zero_()  # an older kernel


def _advise(advice: int, part: torch.Tensor) -> int:
    before = part.data_ptr() % mmap.PAGESIZE
    start, nbytes = part.data_ptr() - before, part.numel() + before
    return int(_madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice))


def _writable(view: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """The same memory under a type of which torch does not warn that it is only read."""
    held = np.frombuffer(view, np.uint8)
    memory = (ctypes.c_uint8 * len(view)).from_address(held.ctypes.data)
    memory.held = held  # type: ignore[attr-defined]  # it does not keep what it was made from
    return memory


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise TransportError("/proc/meminfo does not say how much memory is available")
