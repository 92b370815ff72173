"""How much of a GPU is in use while an update runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightsync.protocol.messages import Samples

__all__ = ["MemorySampler", "used_nbytes"]

_EVERY_S = 0.005


class MemorySampler:
    """Looks at `read` on a thread of its own, until `stop`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._started = time.perf_counter()
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="sample_memory", daemon=True)
        self._thread.start()

    def stop(self) -> Samples:
        """What was seen, where it changed."""
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
    """On the first device that this process sees, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free
