"""Decides the way of each engine: it reads the trainers' memory directly, or takes broadcasts, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weightsync.config import SyncConfig
from weightsync.protocol.messages import Forward, Read, Receive, UpdateTask
from weightsync.report import DIRECT, is_direct

LATER = "its holder came after connecting, and meets those of other hosts with the next update"
JOINING = "it has joined, and its reads are planned before the next update"
UNPLANNED = "what it needs of other hosts was not planned when all connected"
FAR = "some trainers are on other hosts"
INCOMPLETE = "no rank keeps some part of a tensor"


def obstacle(
    config: SyncConfig,
    demoted: str,
    failed: str,
    *,
    trainers_export: bool,
    engine_exports: bool,
    converts: str,
) -> str:
    """Return why an engine may not read the trainers' memory directly, or "".

    Args:
        demoted: why the engine was demoted before, or "".
        failed: why holders could not map trainers' memory in a trial, or "".
        trainers_export: every trainer rank exports memory or, before `attach`, can export memory.
        engine_exports: the same for the engine's ranks.
        converts: the ranks' conversion of the tensors, see `RankLayout`.
    """
    if converts:
        return f"it takes whole tensors, of which {converts}"
    if config.mode == "broadcast":
        return "sync.mode is broadcast"
    if demoted:
        return demoted
    if not trainers_export:
        return "the trainers' weights are not read in place"
    if not engine_exports:
        return "its memory is not written by its holders: quantised, offloaded, or not to be shared"
    return failed


def suffices(routes: Iterable[str], num_slots: int) -> bool:
    """Return True if every engine reads directly, now or later, or the plan has buckets."""
    return num_slots > 0 or all(route in (DIRECT, LATER, JOINING) for route in routes)


def tasks(
    takers: Mapping[str, Sequence[int]],
    routes: Mapping[str, str],
    cast: frozenset[int],
    exchanging: frozenset[int],
    num_holders: int,
    frozen: bool,
) -> dict[int, UpdateTask]:
    """Return the update task of each holder that has one.

    Args:
        takers: the engines that take part, with each engine's holders.
        routes: see `Router`.
        cast: buckets that are broadcast to engines which read directly.
        exchanging: the holders of the cross-host exchange; empty if no engine needs the exchange.
        num_holders: all of the plan.
        frozen: whether frozen tensors move, too.
    """
    reading = {i for name, holders in takers.items() if is_direct(routes.get(name, "")) for i in holders}
    receiving = {i for holders in takers.values() for i in holders} - reading
    sent = None if receiving else cast

    def task(holder: int) -> UpdateTask:
        exchanges = holder in exchanging
        if holder in reading:
            return Read(sent, exchanges, frozen, cast)
        return (Receive if holder in receiving else Forward)(sent, exchanges, frozen)

    members = range(num_holders) if receiving or cast else sorted(reading | exchanging)
    return {holder: task(holder) for holder in members}
