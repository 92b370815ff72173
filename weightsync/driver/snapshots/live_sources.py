"""Engines that serve the committed version, as sources of others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager

from weightsync.config import SyncConfig
from weightsync.driver.connecting.connect import Connection, FlatLayout
from weightsync.driver.engine_group import EngineGroup
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import SnapshotHeader

logger = logging.getLogger("weightsync.driver")

_OFFER_S = 10.0
"""How long a refill waits for offers. A holder that is late is left out."""
_RESERVE_S = 1.0
"""The same, for offers that it may not need."""


class LiveSources:
    """Has holders offer their engine ranks' live memory while another engine is refilled from it.

    The holder must have mapped the memory, and an update or a refill must have filled the memory since.

    Attributes:
        left_out: engines that are no source until the next update, since their memory is released.
        are_offered: whether holders may serve live memory: `withdrawn` ends that.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet, engine_group: EngineGroup) -> None:
        self._config, self._fleet, self._engine_group = config, fleet, engine_group
        self.left_out = frozenset[str]()
        self.are_offered = False
        self._readers: Counter[int] = Counter()
        self._withdrawing: set[asyncio.Future[None]] = set()

    def by_host(self, version: int, connection: Connection, engine: str) -> dict[str, str]:
        """Return equal engines that can fill `engine`, one for each host of a first rank."""
        flat = connection.flat_layouts[engine]
        found: dict[str, str] = {}
        for name, member in self._fleet.engines.items():
            serves = (member.record.state, member.record.version) == (EngineState.SERVING, version)
            if (
                serves
                and member.attached
                and connection.flat_layouts.get(name) == flat
                and name not in (engine, *self.left_out)
            ):
                found.setdefault(self._fleet.node(member.holders[0]), name)
        return found

    @asynccontextmanager
    async def offered(
        self, version: int, flat: FlatLayout, names: Collection[str], reserve: Collection[str]
    ) -> AsyncIterator[Mapping[str, Mapping[int, Offer]]]:
        """Have the holders of engines `names` and `reserve` offer their ranks' memory while the body runs.

        Yields each engine's offers by the part's number. A holder that fails is logged and left out. Holders
        of `reserve` have less time to answer.
        """
        ranks = {name: self._fleet.engines[name].holders for name in (*names, *reserve)}
        headers = {
            holder: SnapshotHeader(version, flat.layout, flat.first + rank)
            for holders in ranks.values()
            for rank, holder in enumerate(holders)
        }
        spare = {holder for name in reserve for holder in ranks[name]}
        self._readers.update(headers.keys())
        self.are_offered = True
        try:
            asked, more = await asyncio.gather(
                self._ask({i: header for i, header in headers.items() if i not in spare}, _OFFER_S),
                self._ask({i: headers[i] for i in spare}, _RESERVE_S),
            )
            offers = asked | more
            yield {
                name: {headers[holder].part: offers[holder] for holder in holders if holder in offers}
                for name, holders in ranks.items()
            }
        finally:
            self._release(headers.keys())

    async def withdrawn(self) -> None:
        """Wait until no holder serves live memory, or does not answer, even if engines are still refilled."""
        if holders := [holder for holder, count in self._readers.items() if count > 0]:
            await self._withdraw(holders)
        if self._withdrawing:
            await asyncio.wait(self._withdrawing)
        self.are_offered = bool(self._withdrawing) or any(n > 0 for n in self._readers.values())

    async def _ask(self, headers: Mapping[int, SnapshotHeader], limit_s: float) -> dict[int, Offer]:
        attempt = self._engine_group.next_attempt()
        calls = {
            f"holder {i}": self._fleet.holders[i].offer_live(header, attempt) for i, header in headers.items()
        }
        outcome = await gather_named(calls, "offer", min(limit_s, self._config.timeout_s))
        for name, error in outcome.failures.items():
            logger.warning("[%s] does not offer its engine's memory: %s", name, error)
        return {i: offer for i in headers if (offer := outcome.answers.get(f"holder {i}"))}

    def _release(self, holders: Collection[int]) -> None:
        """Withdraw offers that no other refill reads.

        This runs in the background: an update may wait for the end of this refill.
        """
        self._readers.subtract(holders)
        if unread := [holder for holder in holders if not self._readers[holder]]:
            task = asyncio.ensure_future(self._withdraw(unread))
            self._withdrawing.add(task)
            task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, holders: Iterable[int]) -> None:
        attempt = self._engine_group.next_attempt()
        calls = {f"holder {i}": self._fleet.holders[i].withdraw_live(attempt) for i in holders}
        outcome = await gather_named(calls, "withdraw", min(GRACE_S, self._config.timeout_s))
        for name, error in outcome.failures.items():
            logger.warning("[%s] may still serve its engine's memory: %s", name, error)
