"""All uses of CuPy: NCCL, device memory that other processes map, our kernels.

Only this module imports CuPy, on use (half a second), so hosts without a GPU do not need it. PyTorch and
CuPy share each device's primary context. Every call sets CuPy's current device to PyTorch's, so each
function works from any thread.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import TransportError
from weightsync.memory.host import to_border

_EXTRAS = "install weightsync with the extra cuda12 or cuda13, whichever torch.version.cuda says"
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

_lock = threading.Lock()
_exported: dict[bytes, int] = {}
_opened: dict[bytes, tuple[int, int]] = {}


def nccl() -> Any:  # noqa: ANN401  # CuPy ships no types
    """Return the module ``cupy.cuda.nccl``. Raises TransportError if CuPy or NCCL is missing."""
    _cupy()
    module = importlib.import_module("cupy.cuda.nccl")
    if not module.available:
        raise TransportError(f"CuPy finds no libnccl.so.2: {_EXTRAS}")
    return module


def nccl_versions() -> tuple[str, str]:
    """Return the versions of CuPy's and PyTorch's NCCL, as ``2.28.9``."""
    number = int(nccl().get_version())
    theirs: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}", ".".join(map(str, theirs[:3]))


def malloc(nbytes: int) -> int:
    """Allocate `nbytes` bytes on the current device and return their address.

    The memory comes from no pool, so it can be exported. Raises TransportError if the device has too little.
    """
    runtime = _runtime()
    try:
        return int(runtime.malloc(nbytes))
    except runtime.CUDARuntimeError as error:
        if error.status != _OUT_OF_MEMORY:
            raise
        free_nbytes, total = runtime.memGetInfo()
        raise TransportError(
            f"cannot take {nbytes} bytes on {_device()}: {free_nbytes} of {total} are free; leave more of "
            "the device to weight sync, such as by a lower gpu_memory_utilization of the engine"
        ) from error


def free(address: int) -> None:
    """Free memory of `malloc`."""
    with _lock:
        for handle in [handle for handle, base in _exported.items() if base == address]:
            del _exported[handle]
    _runtime().free(address)


def export(addresses: Iterable[int]) -> dict[int, tuple[bytes, int]]:
    """Return for each address the CUDA IPC handle of the allocation, and the offset there.

    CUDA is asked once per allocation, in which PyTorch puts many tensors.

    Raises TransportError for memory that cannot be exported: virtual memory, as PyTorch's expandable
    segments and vLLM's sleep mode use it.
    """
    exported: dict[int, tuple[bytes, int]] = {}
    handle, base, end = b"", 0, 0
    for address in sorted(addresses):
        if not base <= address < end:
            base, nbytes = allocation(address)
            end, handle = base + nbytes, ipc_handle(base)
        exported[address] = handle, address - base
    return exported


def ipc_handle(base: int) -> bytes:
    """Return the handle of the allocation that begins at `base`. Raises the errors of `export`."""
    runtime = _runtime()
    try:
        handle = bytes(runtime.ipcGetMemHandle(base))
    except runtime.CUDARuntimeError as error:
        raise TransportError(
            f"memory at {base:#x} on {_device()} cannot be shared with another process ({error}): "
            "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF), and "
            "allocate the tensor outside of vLLM's sleep mode"
        ) from error
    with _lock:
        _exported[handle] = base
    return handle


def open_handle(handle: bytes) -> int:
    """Map an exported allocation on the current device and return its address.

    Repeated calls return the same mapping; every `open_handle` needs a `close_handle`. A handle of this
    process gives the original address. Raises TransportError if the allocation cannot be mapped.
    """
    with _lock:
        if handle in _exported:
            return _exported[handle]
        address, count = _opened.get(handle, (0, 0))
        if not count:
            address = _map(handle)
        _opened[handle] = (address, count + 1)
        return address


def close_handle(handle: bytes) -> None:
    """Undo one `open_handle`; the last one unmaps."""
    with _lock:
        if handle not in _opened:
            return  # this process's own memory
        address, count = _opened.pop(handle)
        if count > 1:
            _opened[handle] = (address, count - 1)
        else:
            _runtime().ipcCloseMemHandle(address)


def copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Start copying `nbytes` from address `source` to `target`, in page-locked memory or on a device."""
    runtime = _runtime()
    while nbytes:  # CUDA refuses to copy memory across the border of two parts, see `SharedBuffer.pin`
        part = min(nbytes, to_border(target), to_border(source))
        runtime.memcpyAsync(target, source, part, runtime.memcpyDefault, stream.cuda_stream)
        target, source, nbytes = target + part, source + part, nbytes - part


def view(address: int, nbytes: int) -> torch.Tensor:
    """View memory of the current device at `address`: uint8 ``[nbytes]``, not copied, not owned."""
    device = torch.device("cuda", torch.cuda.current_device())
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Memory(address, nbytes), device=device)


def load(name: str) -> None:
    """Compile kernel `name` of ``kernels.cu`` and load it on the current device.

    A launch would load it too. But loading may wait for all work on the device, and never ends if that
    includes a collective whose peers wait for this process.
    """
    _runtime()
    # Asking for attributes makes CUDA load the kernel; CuPy's `compile` does not promise that.
    _ = _kernel(name).attributes


def launch(
    name: str, stream: torch.cuda.Stream, num_blocks: int, num_threads: int, args: Sequence[object]
) -> None:
    """Launch kernel `name` of ``kernels.cu`` on `stream`, asynchronously.

    Args:
        args: in the kernel's order, as numpy scalars of the parameters' sizes.
    """
    cupy = _cupy()
    with torch.cuda.device(stream.device):
        _runtime()
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            _kernel(name)((num_blocks,), (num_threads,), tuple(args))


class _Stream:
    """A stream with CUDA's stream protocol, which some supported versions of PyTorch lack."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


class _Memory:
    """Device memory with the interface through which PyTorch views it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _cupy() -> Any:  # noqa: ANN401
    try:
        import cupy
    except ImportError as error:
        raise TransportError(f"the GPU path needs CuPy: {_EXTRAS}") from error
    return cupy


def _runtime() -> Any:  # noqa: ANN401
    """Return CuPy's runtime API, with PyTorch's current device set for this thread."""
    runtime = _cupy().cuda.runtime
    runtime.setDevice(torch.cuda.current_device())
    return runtime


@functools.cache
def _kernel(name: str) -> Any:  # noqa: ANN401
    """Return a kernel. CuPy compiles it on first use per device and caches it on disk.

    Only this kernel is compiled (0.2 s): all kernels take 0.7 s, for which a starting engine would wait.
    """
    source = (Path(__file__).parent / "kernels/kernels.cu").read_text()
    options = ("--std=c++17", f"-DKERNEL_{name}")
    return _cupy().RawModule(code=source, backend="nvrtc", options=options).get_function(name)


def _map(handle: bytes) -> int:
    runtime = _runtime()
    try:
        return int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))
    except runtime.CUDARuntimeError as error:
        raise TransportError(
            f"cannot map another process's memory on {_device()}: {error}; this process must be alive, "
            "and both need the same GPU"
        ) from error


def allocation(address: int) -> tuple[int, int]:
    """Return the first address and the size of the allocation at `address`, as IPC handles name it."""
    _runtime()  # sets this thread's device
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
    )
    if status:
        raise TransportError(f"{address:#x} is no memory of {_device()}: CUDA error {status}")
    return base.value, nbytes.value


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}"
