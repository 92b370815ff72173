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
    if version != kept:
        index.expected = None  # it is of an earlier version, or of parts of one
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


async def note_served(fleet: Fleet, config: SyncConfig, told: int) -> None:
    """Note the versions of earlier drivers that engines served, maybe before a pause. New ones are greater.

    `told`: the last version that this driver told engines to serve. It may be tried again. Raises
    DeadlineError with the names of engines that do not answer, and the errors of lost ones.
    """
    calls = {f"engine {name}": member.peer.served() for name, member in fleet.live().items()}
    answers = (await gather_named(calls, "served", config.timeout_s)).require()
    known = {name: version for name, version in answers.items() if version not in (0, told)}
    fleet.served = {**fleet.served, **known}
