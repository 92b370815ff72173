"""Buckets on their way through a holder: some are being broadcast while others go out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from weightsync.holder.bucket_consumers import Outlet
from weightsync.transports import Pending

__all__ = ["pump"]


def pump(
    buckets: Iterable[int],
    num_ahead: int,
    start: Callable[[int], Sequence[Pending]],
    arrived: Callable[[int], None],
    outlet: Outlet,
) -> None:
    """`start` each bucket, `num_ahead` of them at once, and offer each to `outlet` once it has `arrived`."""
    ahead: deque[tuple[int, Sequence[Pending]]] = deque()

    def hand_over() -> None:
        bucket, started = ahead.popleft()
        for pending in started:
            pending.wait()
        arrived(bucket)
        outlet.offer(bucket)

    for bucket in buckets:
        outlet.wait_free(bucket)
        ahead.append((bucket, start(bucket)))
        if len(ahead) == num_ahead:
            hand_over()
    while ahead:
        hand_over()
