"""Page-locked memory by way of which other host memory goes to a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from weightsync.memory import num_threads

__all__ = ["Bounce", "Sent"]

_NUM_THREADS = 8
_PLACES_PER_THREAD = 2
"""One is copied to the device while the other is filled."""


class Sent(Protocol):
    """`nbytes` that belong at `offset` of a slot."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def copy(self, target: torch.Tensor) -> None:
        """To `target`, uint8[nbytes] in host memory; the calls of several threads go on beside each other."""


@dataclass(slots=True)
class _Place:
    memory: torch.Tensor
    sent: torch.cuda.Event | None = None

    def take(self, part: Sent) -> None:
        if self.sent:
            self.sent.synchronize()
        part.copy(self.memory[: part.nbytes])


class Bounce:
    """Places that threads fill while others are copied to the device.

    What is sent need not be page-locked itself then, which takes longer than sending it once. There are so
    few places that they stay in the processor's cache: otherwise its memory is what takes the time.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: the most that a part has."""
        self._nbytes = nbytes
        self._threads = ThreadPoolExecutor(num_threads(_NUM_THREADS), "bounce")
        self._free, self._lost = self._places(), False

    def send(self, parts: Sequence[Sent], slot: torch.Tensor, timeout_s: float) -> None:
        """Begin to copy `parts` to `slot` on the current stream. What had the slot before has arrived.

        Raises `concurrent.futures.TimeoutError` when the device has not taken earlier parts in time.
        """
        deadline = time.monotonic() + timeout_s
        if self._lost:
            self._free, self._lost = self._places(), False
        taken: deque[tuple[Sent, _Place, Future[None]]] = deque()

        def pass_on() -> None:
            part, place, done = taken.popleft()
            done.result(max(0.0, deadline - time.monotonic()))
            target = slot[part.offset : part.offset + part.nbytes]
            target.copy_(place.memory[: part.nbytes], non_blocking=True)
            if slot.is_cuda:
                place.sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                place.sent.record()
            self._free.append(place)

        try:
            for part in parts:
                if not self._free:
                    pass_on()
                place = self._free.popleft()
                taken.append((part, place, self._threads.submit(place.take, part)))
            while taken:
                pass_on()
        except BaseException:
            self._lost = True  # threads may still write to those that are taken
            raise

    def close(self) -> None:
        """Give the memory back. Nothing may be on its way."""
        self._threads.shutdown()
        self._free.clear()

    def _places(self) -> deque[_Place]:
        num_places = num_threads(_NUM_THREADS) * _PLACES_PER_THREAD
        memory = torch.empty(num_places, self._nbytes, dtype=torch.uint8, pin_memory=True)
        return deque(map(_Place, memory))
