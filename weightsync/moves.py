"""What one update does on a holder, from the first byte to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightsync.exchange import Exchange
from weightsync.faults import strike, strike_move
from weightsync.outlet import Outlet
from weightsync.plan import Plan
from weightsync.prepared import Way
from weightsync.pump import pump
from weightsync.staging import Staging
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
    pump(
        range(plan.num_buckets) if way.broadcasts_all else sorted(way.cast),
        # A slot is filled again once it was written out, and not all of them have their turn here.
        plan.slots if way.broadcasts_all else 1,
        start,
        lambda bucket: strike_move(plan, bucket, index, staging.at if staging.slots else None),
        outlet,
    )
    outlet.finish(plan.num_buckets)
