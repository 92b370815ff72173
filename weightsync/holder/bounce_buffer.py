"""Page-locked memory by way of which other host memory goes to a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from weightsync.memory.host import num_threads

__all__ = ["Bounce", "Sent"]


class Sent(Protocol):
    """`nbytes` that belong at `offset` of a slot."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def copy(self, target: torch.Tensor) -> None:
        """To `target`, uint8[nbytes] in host memory; the calls of several threads go on beside each other."""


class Bounce:
    """A buffer for each slot, which threads fill while another is copied to the device.

    What is sent need not be page-locked itself then, which takes longer than sending it once.
    """

    def __init__(self, num_slots: int, nbytes: int) -> None:
        """`nbytes`: how far apart in a slot the first and the last byte of a bucket lie at most."""
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_slots)]
        self._threads = ThreadPoolExecutor(num_threads(8), "bounce")

    def send(self, bucket: int, parts: Sequence[Sent], slot: torch.Tensor) -> None:
        """Begin to copy `parts` to `slot` on the current stream. What had the slot before has arrived."""
        buffer, first = self._buffers[bucket % len(self._buffers)], min(part.offset for part in parts)
        places = [buffer[part.offset - first :][: part.nbytes] for part in parts]
        copied = self._threads.map(lambda part, place: part.copy(place), parts, places)
        for part, place, _ in zip(parts, places, copied, strict=True):
            slot[part.offset : part.offset + part.nbytes].copy_(place, non_blocking=True)

    def close(self) -> None:
        """Give the memory back. Nothing may be on its way."""
        self._threads.shutdown()
        self._buffers = []
