"""How much of a GPU is in use while an update runs, and in which of its phases it was most."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from weightsync.driver.gather import GRACE_S, gather_named

if TYPE_CHECKING:
    from weightsync.protocol.peers import Fleet
    from weightsync.protocol.timing import Span

__all__ = ["Gauge", "Gauged", "Samples", "gauged", "peaks"]

Samples = Sequence[tuple[float, int]]
"""Seconds since the first look, and the bytes that were in use from then on."""

_EVERY_S = 0.005


class Gauge:
    """Looks at `read` on a thread of its own, until `stop`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._started = time.perf_counter()
        self._samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="gauge", daemon=True)
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


class Gauged:
    """The part of a holder that watches its device."""

    _device: str
    _gauge: Gauge | None = None

    def gauge(self, on: bool) -> tuple[str, Samples]:
        """Begin or end to look: which device, and what was seen; nothing where there is none."""
        seen: Samples = self._gauge.stop() if self._gauge else ()
        self._gauge = Gauge(_used_nbytes) if on and self._device else None
        return self._device, seen


def _used_nbytes() -> int:
    """On the first device that this process sees, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free


@asynccontextmanager
async def gauged(
    fleet: Fleet, holders: Collection[int], now: Callable[[], float]
) -> AsyncIterator[dict[str, Samples]]:
    """Have `holders` look at their devices during the body; afterwards has what they saw, by device.

    Its times are `now`'s: a holder counts from its first look, which it has taken when it answers.
    A holder that does not answer is left out: it will be noticed elsewhere.
    """
    seen: dict[str, Samples] = {}
    began: dict[int, float] = {}
    if not holders:
        yield seen
        return

    async def begin(holder: int) -> None:
        await fleet.holders[holder].gauge(True)
        began[holder] = now()

    async def end(holder: int) -> None:
        device, samples = await fleet.holders[holder].gauge(False)
        if device and holder in began:
            seen[device] = [(began[holder] + at, used) for at, used in samples]

    async def each(do: Callable[[int], Coroutine[object, object, None]]) -> None:
        calls = {f"holder {i}": do(i) for i in holders if i < len(fleet.holders)}
        await gather_named(calls, "gauge", GRACE_S)

    await each(begin)
    try:
        yield seen
    finally:
        await each(end)


def peaks(seen: Mapping[str, Samples], spans: Sequence[Span]) -> dict[str, dict[str, int]]:
    """By phase and device, the most that was in use; a sample counts until the next one.

    The last phase has all that was seen after it began: what it took is there when it ends.
    """
    ends = [span.began + span.seconds for span in spans[:-1]] + [math.inf]
    return {
        span.name: {device: _peak(samples, span.began, end) for device, samples in seen.items() if samples}
        for span, end in zip(spans, ends, strict=True)
        if seen
    }


def _peak(samples: Samples, began: float, ended: float) -> int:
    times = [at for at, _ in samples]
    first = max(0, bisect_right(times, began) - 1)
    return max(used for _, used in samples[first : max(bisect_right(times, ended), first + 1)])
