"""From a fleet to a plan that every member holds, with every path used once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightsync.clock import PhaseClock
from weightsync.config import SyncConfig
from weightsync.deadline import GRACE_S, gather_named
from weightsync.errors import PlanError, StateError
from weightsync.peers import Fleet
from weightsync.plan import Layout, Members, Plan, make_plan

if TYPE_CHECKING:
    from weightsync.holder import Prepared

__all__ = ["connect"]


async def connect(fleet: Fleet, config: SyncConfig, epoch: int) -> tuple[Plan, dict[str, float]]:
    """Layouts → plan → memory → communicators → digests compared → warm-up.

    Returns the plan and the seconds of each phase.

    Raises:
        PlanError, ConfigError: the two sides do not fit, or a member computed another plan.
        DeadlineError: naming who did not come within ``config.connect_timeout_s``.
        StateError: no engine is alive.
    """
    clock = PhaseClock()
    timeout_s = config.connect_timeout_s
    with clock.phase("layouts"):
        plan = await _plan(fleet, config, epoch)
    with clock.phase("prepare"):
        calls = {f"holder {i}": holder.prepare(plan, i) for i, holder in enumerate(fleet.holders)}
        prepared = list((await gather_named(calls, "prepare", timeout_s)).require().values())
    with clock.phase("join"):
        offers = {group: offer for answer in prepared for group, offer in answer.offers.items()}
        # The communicators keep this deadline for every broadcast.
        joins = {
            name: holder.join(offers, config.timeout_s) for name, holder in fleet.named_holders().items()
        }
        (await gather_named(joins, "join", timeout_s)).require()
    with clock.phase("attach"):
        digests = {f"holder {i}": [answer.plan_digest] for i, answer in enumerate(prepared)}
        digests |= await _attach(fleet, plan, prepared, timeout_s)
        _compare(plan, digests)
    with clock.phase("warm_up"):
        warm_ups = {name: holder.warm_up() for name, holder in fleet.named_holders().items()}
        (await gather_named(warm_ups, "warm-up", timeout_s)).require()
    return plan, clock.seconds


async def _plan(fleet: Fleet, config: SyncConfig, epoch: int) -> Plan:
    live = fleet.live()
    if not live:
        raise StateError("no engine is alive: add_engine() has to come first")
    trainers, engines = await asyncio.gather(
        gather_named(
            {f"trainer {i}": trainer.layout() for i, (trainer, _) in enumerate(fleet.trainers)},
            "layout",
            config.connect_timeout_s,
        ),
        gather_named(
            {f"engine {name}": seat.peer.layout() for name, seat in live.items()},
            "layout",
            config.connect_timeout_s,
        ),
    )
    source = Layout.from_ranks(list(trainers.require().values()))
    needs = {name: Layout.from_ranks(list(engines.require()[f"engine {name}"])) for name in live}
    return make_plan(
        source,
        needs,
        Members(
            num_holders=len(fleet.holders),
            trainers=tuple(holder for _, holder in fleet.trainers),
            engines=tuple((name, seat.holders) for name, seat in live.items()),
        ),
        bucket_bytes=config.bucket_bytes,
        max_staging_bytes=config.max_staging_bytes,
        epoch=epoch,
    )


async def _attach(
    fleet: Fleet, plan: Plan, prepared: list[Prepared], timeout_s: float
) -> Mapping[str, list[str]]:
    """Everybody maps and connects; returns the plan's digests as trainers and engines computed them."""
    trainers = {}
    for rank, (trainer, holder) in enumerate(fleet.trainers):
        arena = prepared[holder].arena
        assert arena is not None
        trainers[f"trainer {rank}"] = trainer.attach(plan, rank, arena)
    engines = {}
    for name, seat in fleet.live().items():
        tickets = [ticket for holder in seat.holders if (ticket := prepared[holder].ticket)]
        engines[f"engine {name}"] = seat.peer.attach(plan, tickets, timeout_s)
    accepts = {name: holder.accept(timeout_s) for name, holder in fleet.named_holders().items()}
    attached, served, accepted = await asyncio.gather(
        gather_named(trainers, "attach", timeout_s + GRACE_S),
        gather_named(engines, "attach", timeout_s + GRACE_S),
        gather_named(accepts, "accept", timeout_s + GRACE_S),
    )
    digests = {name: list(found) for name, found in served.require().items()}
    accepted.require()
    return digests | {name: [digest] for name, digest in attached.require().items()}


def _compare(plan: Plan, digests: Mapping[str, list[str]]) -> None:
    wanted = plan.digest()
    for name, found in digests.items():
        for digest in found:
            if digest != wanted:
                raise PlanError(name, f"it computed plan {digest[:12]}, the controller {wanted[:12]}")
