"""What one update does on a holder, from the first byte to the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from weightsync.faults import strike, strike_move
from weightsync.holder.bucket_consumers import Outlet
from weightsync.holder.cross_host import Exchange
from weightsync.holder.staging import Staging
from weightsync.plan import Plan
from weightsync.protocol.messages import Way
from weightsync.transports import Pending

__all__ = ["carry_out"]


def carry_out(
    plan: Plan,
    way: Way,
    index: int,
    staging: Staging,
    exchange: Exchange | None,
    start: Callable[[int], Sequence[Pending]],
    outlet: Outlet,
) -> None:
    """Read what is near, exchange what is not, then `start` and hand on the buckets that are broadcast.

    By holder `index`. What fails is raised as it is.
    """
    writes = way.pulls and outlet.taking
    if writes or way.exchanges:
        strike("move", bucket=0, num_buckets=1)
    if writes:
        staging.pull()
    if way.exchanges:
        assert exchange
        exchange.move(lambda: way.pulls and outlet.taking)
    _pump(
        range(plan.num_buckets) if way.broadcasts_all else sorted(way.cast),
        # A slot is filled again once it was written out, and not all of them have their turn here.
        plan.slots if way.broadcasts_all else 1,
        start,
        lambda bucket: strike_move(plan, bucket, index, staging.at if staging.slots else None),
        outlet,
    )
    outlet.finish(plan.num_buckets)


def _pump(
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
