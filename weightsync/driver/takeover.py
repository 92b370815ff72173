"""Takes over from a driver that died: finds the version that it committed."""

from __future__ import annotations

import logging

from weightsync.driver.connect import Connection
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineRecord, EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.snapshot_index import SnapshotIndex

logger = logging.getLogger("weightsync.driver.controller")


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
