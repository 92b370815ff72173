"""Peak use of GPU memory in each phase of an update."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.protocol.messages import Samples
from weightsync.protocol.timing import Span


@asynccontextmanager
async def sampled(
    fleet: Fleet, holders: Collection[int], now: Callable[[], float]
) -> AsyncIterator[dict[str, Samples]]:
    """Have `holders` sample their devices' memory during the body.

    Yields a dict that has samples by device after the body, with times by the clock `now`. A holder takes the
    first sample before it answers. Holders that do not answer are left out; other calls report them.
    """
    seen: dict[str, Samples] = {}
    began: dict[int, float] = {}
    if not holders:
        yield seen
        return

    async def begin(holder: int) -> None:
        await fleet.holders[holder].sample_memory(True)
        began[holder] = now()

    async def end(holder: int) -> None:
        device, samples = await fleet.holders[holder].sample_memory(False)
        if device and holder in began:
            seen[device] = [(began[holder] + at, used) for at, used in samples]

    async def each(do: Callable[[int], Coroutine[object, object, None]]) -> None:
        calls = {f"holder {i}": do(i) for i in holders if i < len(fleet.holders)}
        await gather_named(calls, "sample_memory", GRACE_S)

    await each(begin)
    try:
        yield seen
    finally:
        await each(end)


def peaks(seen: Mapping[str, Samples], spans: Sequence[Span]) -> dict[str, dict[str, int]]:
    """Return the peak bytes in use, by phase and device. A sample counts until the next one.

    The last phase includes every sample after its start, also samples after its end.
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
