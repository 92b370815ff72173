"""Host memory that one process creates and others on the same host map."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

from weightsync.errors import PeerLostError, TransportError
from weightsync.protocol.handles import BufferHandle

_madvise = ctypes.CDLL(None).madvise  # unlike mmap.madvise and MAP_POPULATE it releases the GIL
POPULATE_READ, POPULATE_WRITE = 22, 23  # since Linux 5.14
PART_NBYTES = 256 << 20
"""Bytes that one thread touches at a time, and bytes of a page-locked part of a large buffer."""


class SharedBuffer:
    """A memfd, or a file in memory, mapped once as a uint8 tensor.

    A memfd has no name in any file system, so nothing is left when the last process ends or is killed.
    `tensor` has shape ``[nbytes]``. With CUDA, the process that makes a memfd page-locks it, and other
    processes call `pin`: copies to and from a device then run at link speed.
    """

    def __init__(self, fd: int, handle: BufferHandle, *, is_new: bool = False, touch: bool = True) -> None:
        self.handle = handle
        self._fd, self._pinned = fd, list[int]()
        # The first touch of a page is many times slower than a write, so no update should do it.
        may = mmap.PROT_READ if handle.is_file else mmap.PROT_READ | mmap.PROT_WRITE
        view = mmap.mmap(fd, max(handle.nbytes, 1), prot=may)
        memory = _writable(view) if handle.is_file else view
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)[: handle.nbytes]
        if touch:
            _touch(self.tensor, is_new)

    @classmethod
    def create(cls, nbytes: int, *, in_parts: bool = False) -> SharedBuffer:
        """Allocate a zeroed buffer, with `in_parts` as in `pin`.

        Raises TransportError if the host has too little memory.
        """
        # Checked first: if memory runs out, the kernel kills processes, not always this process.
        available = psutil.virtual_memory().available
        if nbytes > available:
            raise TransportError(
                f"cannot take {nbytes} bytes of shared memory: the host has {available} left"
            )
        name = f"weightsync-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        buffer = cls(fd, BufferHandle(os.getpid(), fd, name, nbytes), is_new=True)
        buffer.pin(in_parts=in_parts)
        return buffer

    @classmethod
    def open(cls, handle: BufferHandle, *, touch: bool = True) -> SharedBuffer:
        """Map another process's buffer. Raises PeerLostError if the process is gone.

        Without `touch`, pages are mapped by `map_pages`, or when they are used.
        """
        fd = open_memory(handle, os.O_RDONLY if handle.is_file else os.O_RDWR)
        return cls(fd, handle, touch=touch)

    @classmethod
    def of_file(cls, fd: int) -> SharedBuffer:
        """Map the file in memory of descriptor `fd`, read-only: a write to `tensor` kills this process."""
        fd = os.dup(fd)
        name = os.readlink(f"/proc/self/fd/{fd}")
        return cls(fd, BufferHandle(os.getpid(), fd, name, os.fstat(fd).st_size, is_file=True), touch=False)

    def fileno(self) -> int:
        """Return the descriptor of the memory, for a child process that maps it too."""
        return self._fd

    def close(self) -> None:
        """Close this process's descriptor and tensor. The last mapping frees the memory."""
        if self._fd >= 0:
            while self._pinned:
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(int(runtime.cudaHostUnregister(self._pinned.pop())))
            os.close(self._fd)
            self._fd = -1
            self.tensor = self.tensor[:0].clone()

    def pin(self, *, in_parts: bool = False) -> None:
        """Page-lock the memory for this process's device copies, if there is a device.

        Closes the buffer if the lock fails. CUDA blocks other calls of the process meanwhile. With
        `in_parts`, calls are only blocked during a part, but only `cuda.copy` may copy to or from a device.
        """
        # Only snapshots need parts: they are large, and locked while updates run. Other buffers are small, or
        # locked by `connect`, and torch copies them, which does not cut copies where two parts meet.
        if not torch.cuda.is_available() or self._pinned:
            return
        at, left = self.tensor.data_ptr(), self.handle.nbytes
        try:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            while left:
                part = min(left, to_border(at)) if in_parts else left
                torch.cuda.check_error(int(runtime.cudaHostRegister(at, part, 0)))
                self._pinned.append(at)
                at, left = at + part, left - part
        except BaseException:
            self.close()
            raise


def open_memory(handle: BufferHandle, flags: int) -> int:
    """Return a descriptor of another process's memory, with `flags` as of `os.open`.

    Raises PeerLostError if the process is gone or denies access.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    target = handle.name if handle.is_file else f"/memfd:{handle.name}"
    try:
        # A pid may be reused after its process ended; the random name is not.
        if os.readlink(path).removesuffix(" (deleted)") != target:
            raise PeerLostError(f"process {handle.pid}", "its shared memory belongs to another process now")
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLostError(
            f"process {handle.pid}", f"its shared memory cannot be opened: {error}"
        ) from error


def to_border(address: int) -> int:
    """Return the bytes from `address` to the next address where two page-locked parts may meet."""
    return PART_NBYTES - address % PART_NBYTES


def num_threads(most: int) -> int:
    """Return `most`, limited to the number of CPUs that this process may use."""
    return min(most, len(os.sched_getaffinity(0)))


def map_pages(part: torch.Tensor) -> None:
    """Map the pages of `part`, uint8[n] of another process's memory, before it is read.

    Reads would map them too, a few at a time and more slowly. Does nothing before Linux 5.14.
    """
    _advise(POPULATE_READ, part)


def _touch(tensor: torch.Tensor, is_new: bool) -> None:
    """Touch all pages in several threads. The kernel clears new pages at 5 GB/s per thread."""
    advice = POPULATE_WRITE if is_new else POPULATE_READ
    parts = (tensor[at : at + PART_NBYTES] for at in range(0, len(tensor), PART_NBYTES))
    with ThreadPoolExecutor(num_threads(8)) as threads:
        if any(threads.map(partial(_advise, advice), parts)):  # before Linux 5.14
            tensor.zero_() if is_new else tensor[:: mmap.PAGESIZE].max()


def _advise(advice: int, part: torch.Tensor) -> int:
    before = part.data_ptr() % mmap.PAGESIZE
    start, nbytes = part.data_ptr() - before, part.numel() + before
    return int(_madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice))


def _writable(view: mmap.mmap) -> ctypes.Array[ctypes.c_uint8]:
    """Return `view` as a type that torch does not warn about as read-only."""
    held = np.frombuffer(view, np.uint8)
    memory = (ctypes.c_uint8 * len(view)).from_address(held.ctypes.data)
    memory.held = held  # type: ignore[attr-defined]  # `memory` itself does not keep the mapping alive
    return memory
