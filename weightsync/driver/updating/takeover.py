"""Takes over from an earlier driver: finds the version that it committed, or that engines serve."""

from __future__ import annotations

import logging

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.driver.snapshots.snapshot_index import SnapshotIndex
from weightsync.errors import ConfigError

logger = logging.getLogger("weightsync.driver")


async def take_over(
    connection: Connection, fleet: Fleet, group: EngineGroup, index: SnapshotIndex
) -> tuple[int, list[str]]:
    """Return the committed version, 0 if there is none, and the engines that do not serve it: STALE.

    It is the newest that an engine serves (so it was committed) or that the holders have complete snapshots
    of. Engines that serve it stay SERVING.
    """
    kept = await index.restore(connection)
    serving = await group.ask(fleet.live(), "serving", lambda peer: peer.serving())
    version = max(kept, *serving.values()) if serving else kept
    if not version:
        return 0, []
    stale = []
    for name, member in fleet.live().items():
        if serving.get(name) == version:
            member.record = EngineRecord(EngineState.SERVING, version)
        else:
            group.enter([name], EngineState.STALE)
            stale.append(name)
    logger.info("[driver · v%d] took over; stale engines: %s", version, stale or "none")
    return version, stale


async def note_served(fleet: Fleet, config: SyncConfig) -> None:
    """Note which versions engines serve before the first update of this driver. New numbers are greater.

    Raises DeadlineError with the names of engines that do not answer, and the errors of lost ones.
    """
    calls = {f"engine {name}": member.peer.serving() for name, member in fleet.live().items()}
    answers = (await gather_named(calls, "serving", config.timeout_s)).require()
    fleet.served = {name: version for name, version in answers.items() if version}


def newest(committed: int, fleet: Fleet) -> int:
    """Return the newest version that is committed, or that an engine served before. 0 if there is none."""
    return max(committed, *fleet.served.values(), 0)


def require_newer(version: int, committed: int, fleet: Fleet) -> None:
    """Raise ConfigError unless `version` is greater than `newest`: rollouts would repeat numbers."""
    if version <= committed:
        raise ConfigError("version", version, f"versions grow: give more than {committed}")
    if version <= (highest := newest(committed, fleet)):
        name = next(name for name, served in fleet.served.items() if served == highest)
        remedy = (
            f"{name} serves version {highest} of an earlier WeightSync: give more than {highest}, or nothing"
        )
        raise ConfigError("version", version, remedy)
