"""The memory sampler: GPU memory in use during an update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightsync.protocol.messages import Samples

_EVERY_S = 0.005


class MemorySampler:
    """Calls `read` every 5 ms in a thread, until `stop`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._started = time.perf_counter()
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="sample_memory", daemon=True)
        self._thread.start()

    def stop(self) -> Samples:
        """Stop, and return the samples at which the value changed."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._samples

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        used = self._read()
        if not self._samples or self._samples[-1][1] != used:
            self._samples.append((time.perf_counter() - self._started, used))


def used_nbytes() -> int:
    """Return the bytes in use, by all processes, on this process's first device."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free
