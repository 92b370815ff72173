"""Decides the way of each engine's weights: its holders read the trainers' memory, or it takes broadcasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from weightsync.config import SyncConfig
from weightsync.driver.connecting.linking import Served
from weightsync.driver.fleet import Fleet
from weightsync.plan import Layout
from weightsync.plan.cross_host.cross_host_parts import Needs
from weightsync.protocol.device_memory import LiveMemory, RankMemory
from weightsync.report import DIRECT

FAR = "some trainers are on other hosts"
INCOMPLETE = "no rank keeps some part of a tensor"
UNPLANNED = "what it needs of other hosts was not planned when all connected"


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """The engine's holders read the trainers' memory.

    Attributes:
        read: by rank, the bytes from each trainer on the rank's host.
        far: the reads of which some are from other hosts, by holder.
        cast: buckets that are broadcast to the engine, too, since a dtype differs.
    """

    read: Sequence[Mapping[int, int]]
    far: Mapping[int, Needs]
    cast: frozenset[int]
    route: str = DIRECT


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """The engine has joined, and will be `Direct`.

    Attributes:
        layout: shared by engines of equal layout, since it is paired with the trainers' layout once.
        exports: the ranks' memory, which holders have mapped.
        converts: see `obstacle`.
    """

    layout: Layout
    exports: Served
    converts: str
    route: ClassVar[str] = "it has joined, and its reads are planned before the next update"


@dataclass(frozen=True, slots=True)
class Later:
    """The engine will be `Direct` once the fleet has connected again, before the next update."""

    route: ClassVar[str] = (
        "its holder came after connecting, and meets those of other hosts with the next update"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The engine takes broadcasts, for which the plan needs buckets.

    Attributes:
        route: why the engine is not `Direct`.
        then: the way once the engine knows how to quantise; None if it takes broadcasts for good.
    """

    route: str
    then: Joining | Direct | None = None


Way: TypeAlias = Direct | Joining | Later | Broadcast
"""The way of an engine's weights. `route` has it in words, as in `SyncReport.routes`."""


def obstacle(
    config: SyncConfig, demoted: str, failed: str, trainers_export: bool, engine_exports: bool, converts: str
) -> str:
    """Return why an engine may not read the trainers' memory directly, or "".

    Args:
        demoted: why the engine was demoted before, or "".
        failed: why holders could not map trainers' memory in a trial, or "".
        trainers_export, engine_exports: all ranks export memory or, before `attach`, can export memory.
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


def first_way(
    config: SyncConfig, demoted: str, failed: str, trainers_export: bool, joining: Joining
) -> Joining | Broadcast:
    """Return the way of an engine that joins. See `obstacle` for the arguments."""
    engine_exports = all(isinstance(each, RankMemory) for each in joining.exports)
    reason = obstacle(config, demoted, failed, trainers_export, engine_exports, joining.converts)
    has_places = all(isinstance(each, LiveMemory) and each.reads for each in joining.exports)
    may_quantise = joining.converts and config.mode == "auto" and trainers_export and not demoted
    return Broadcast(reason, joining if may_quantise and has_places else None) if reason else joining


def settled(config: SyncConfig, fleet: Fleet) -> SyncConfig:
    """Decide ``sync.stage: auto``: return the config with ``none``, or unchanged to stage versions.

    Versions are staged if an engine rank has no trainer on its host. Otherwise such engines would be paused
    while bytes cross a network.
    """
    if config.stage != "auto":
        return config
    with_trainers = {fleet.node(holder) for _, holder in fleet.trainers}
    far = {fleet.node(holder) for member in fleet.live().values() for holder in member.holders}
    if config.keep_versions < 2 or config.mode == "direct" or far <= with_trainers:
        return replace(config, stage="none")
    return config
