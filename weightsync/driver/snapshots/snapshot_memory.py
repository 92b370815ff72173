"""Memory of snapshots, which holders allocate and map in the background once a fleet is connected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from weightsync.config import SyncConfig
from weightsync.driver.events import Events, HolderSilent
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import Outcome, gather_named
from weightsync.errors import DeadlineError, PeerLostError
from weightsync.protocol.handles import Offer

logger = logging.getLogger("weightsync.driver")


def reserving(
    config: SyncConfig,
    fleet: Fleet,
    events: Events,
    parts: Mapping[int, int],
    readers: Mapping[int, int],
    in_place: bool,
) -> asyncio.Task[None]:
    """Start to have holders allocate, page-lock and map memory, which takes seconds for tens of GB.

    No update needs it: a version is copied after it has committed. So `connect` does not wait for it. The
    task ends when all holders have memory, or failed to get memory. Each step has its own deadline.

    Args:
        parts: for each holder that allocates memory, by index, the number of the part.
        readers: holders that map a part, if another holder on the same host has the part.
        in_place: whether parts are the served weights of engine ranks.
    """
    # The fleet as it is now: engines may join and leave before holders have answered.
    peers = [*fleet.holders]
    nodes = [fleet.node(i) for i in range(len(peers))]

    def tell(outcome: Outcome[Offer | None] | Outcome[None], what: str) -> None:
        for error in outcome.failures.values():
            logger.warning("[driver] %s: %s", what, error)
            if isinstance(error, (DeadlineError, PeerLostError)):
                events.publish(HolderSilent())

    async def reserve() -> None:
        began = time.monotonic()
        calls = {f"holder {home}": peers[home].reserve(part, in_place) for home, part in parts.items()}
        reserved = await gather_named(calls, "reserve", config.connect_timeout_s)
        tell(reserved, "not every holder can keep versions")
        offers = {home: offer for home in parts if (offer := reserved.answers.get(f"holder {home}"))}
        shared = _near(parts, readers, nodes, offers)
        maps = {f"holder {reader}": peers[reader].map(its) for reader, its in shared.items()}
        tell(
            await gather_named(maps, "map", config.connect_timeout_s),
            "a snapshot on the same host is not mapped",
        )
        if offers:
            logger.info("[driver] memory for copies is there after %.1f s", time.monotonic() - began)

    task = asyncio.create_task(reserve())
    task.add_done_callback(_log_error)
    return task


def _near(
    parts: Mapping[int, int], readers: Mapping[int, int], nodes: list[str], offers: Mapping[int, Offer]
) -> Mapping[int, Mapping[int, tuple[Offer]]]:
    """Return the offer that each reader without an own copy maps on its host, by the part's number."""
    found: dict[int, Mapping[int, tuple[Offer]]] = {}
    for reader, part in readers.items():
        if reader in offers and parts[reader] == part:
            continue
        for home, offer in offers.items():
            if parts[home] == part and nodes[home] == nodes[reader]:
                found[reader] = {part: (offer,)}
    return found


def _log_error(task: asyncio.Task[None]) -> None:
    """Log a bug at once, since nobody else asks the task for errors."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("[driver] holders may have no memory for copies: %r", error)
