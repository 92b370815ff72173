"""Mooncake's process: ``python -m weightsync.readers.mooncake_child``.

Only SIGKILL guarantees that no byte of a failed read is written later: Mooncake's first contact with a
hanging peer has no deadline, a read may still write after a timeout, and unregistering memory is no barrier.

Orders are lines of JSON. The answer is one line, ``{"error": cause}`` if the order failed. The first order
has the memory to register, later orders have reads. The process ends at the end of stdin.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import Any

WINDOW = 4
"""Pieces to read at a time."""
MIN_PAUSE_S, MAX_PAUSE_S = 50e-6, 1e-3

_ENDS = {-1: "the read failed", -2: "the read made no progress"}


def main() -> None:
    """Follow orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    memory: _Memory | None = None
    while True:
        order = json.loads(orders.get())
        answer: dict[str, object]
        try:
            if memory is None:
                memory = _Memory(**order)
                answer = {"endpoint": memory.endpoint, "bases": memory.bases}
            else:
                answer = {"nbytes": memory.read(order["endpoint"], order["pieces"])}
        except (OSError, RuntimeError) as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")


def _listen(orders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)  # even if the main thread hangs in a call


class _Memory:
    """Registered memory and the engine that moves it."""

    def __init__(self, host: str, device: str, memories: list[tuple[int, int]], writable: bool) -> None:
        """`memories` has pairs of descriptor and bytes, mapped read-only unless `writable`."""
        self._engine = _engine()
        # Mooncake ignores the third argument, the protocol: environment variables choose it.
        if status := self._engine.initialize(host, "P2PHANDSHAKE", "", device):
            raise RuntimeError(
                f"Mooncake does not start on {host}, device {device or 'any'}: status {status}"
            )
        port = self._engine.get_rpc_port()
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.bases = [self._register(fd, nbytes, writable) for fd, nbytes in memories]

    def read(self, endpoint: str, pieces: list[tuple[int, int, int, int]]) -> int:
        """Read `pieces`: (memory, offset, address at the peer, nbytes). Returns the total bytes."""
        todo, flying = deque(pieces), set[int]()
        pause = MIN_PAUSE_S
        while todo or flying:
            while todo and len(flying) < WINDOW:
                flying.add(self._start(endpoint, *todo.popleft()))
            over = {batch for batch in flying if self._is_over(batch)}
            flying -= over
            # Mooncake's own waits spin on a core.
            pause = MIN_PAUSE_S if over else min(1.5 * pause, MAX_PAUSE_S)
            if not over:
                time.sleep(pause)
        return sum(nbytes for *_, nbytes in pieces)

    def _start(self, endpoint: str, memory: int, offset: int, address: int, nbytes: int) -> int:
        # One piece per batch: a batch has the status of its first piece.
        batch: int = self._engine.batch_transfer_async_read(
            endpoint, [self.bases[memory] + offset], [address], [nbytes]
        )
        if batch == 0:
            raise RuntimeError("no process answers there, or these bytes may not be read")
        return batch

    def _is_over(self, batch: int) -> bool:
        status = self._engine.transfer_check_status(batch)
        if status < 0:
            raise RuntimeError(_ENDS.get(status, f"status {status}"))
        return bool(status)

    def _register(self, fd: int, nbytes: int, writable: bool) -> int:
        address = _map(fd, max(nbytes, 1), writable)
        if status := self._engine.register_memory(address, max(nbytes, 1)):
            raise RuntimeError(f"Mooncake does not register {nbytes} bytes: status {status}")
        return address


def _engine() -> Any:  # noqa: ANN401 - it has no types
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise RuntimeError(
            f"Mooncake cannot be imported ({error}): it needs the system's libibverbs1 and "
            "pip install 'weightsync[mooncake]'"
        ) from error
    return TransferEngine()


def _map(fd: int, nbytes: int, writable: bool) -> int:
    """Map `fd` until the process ends; return the address."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address: int | None = call(None, nbytes, prot, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes cannot be mapped")
    return address


if __name__ == "__main__":
    main()
