"""Copies of the committed version that holders make for all engine ranks of their host."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import SnapshotHeader, SnapshotPart
from weightsync.protocol.peers import HolderPeer

logger = logging.getLogger("weightsync.driver")

Wanted = Sequence[tuple[SnapshotPart, Sequence[Offer]]]
"""Parts to copy, and for each part the offers of more holders."""


class HostCopies:
    """Has holders copy parts from other hosts before several ranks of their host read them.

    The copies stay until the next version commits.

    Attributes:
        made: the copies, and ones under way, by holder.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._making: dict[str, asyncio.Task[None]] = {}
        self.made: list[tuple[HolderPeer, SnapshotHeader]] = []

    def start(
        self, homes: Sequence[int], wanted: Wanted, add: Callable[[int, Offer, str], None]
    ) -> asyncio.Task[None]:
        """Start to copy `wanted` to `homes`, holders of one host, unless others are copied there.

        Returns a task that ends with these copies. For each copy, `add` is called with the part's number, the
        holder's offer and the host. Failed copies are logged.
        """
        host = self._fleet.node(homes[0])
        if host not in self._making:
            task = self._making[host] = asyncio.ensure_future(self._copy(homes, wanted, add))
            task.add_done_callback(lambda _: self._making.pop(host))
        return self._making[host]

    def note(self, holder: int, header: SnapshotHeader) -> None:
        """Note a copy that is to be freed once the next version commits."""
        self.made.append((self._fleet.holders[holder], header))

    async def free(self) -> None:
        """Have holders free the copies of the previous version."""
        made, self.made = self.made, []
        calls = {f"copy {i}": peer.release(header) for i, (peer, header) in enumerate(made)}
        outcome = await gather_named(calls, "release", GRACE_S)
        for error in outcome.failures.values():
            logger.warning("[driver] a copy of an earlier version may not be freed: %s", error)

    async def stop(self) -> None:
        """Stop waiting for copies."""
        tasks = [*self._making.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _copy(
        self, homes: Sequence[int], parts: Wanted, add: Callable[[int, Offer, str], None]
    ) -> None:
        shares: defaultdict[int, list[tuple[SnapshotPart, Sequence[Offer]]]] = defaultdict(list)
        for part, others in parts:
            home = homes[part.header.part % len(homes)]
            shares[home].append((part, others))
            self.note(home, part.header)

        async def copy(home: int) -> None:
            holder, host = self._fleet.holders[home], self._fleet.node(home)
            for part, others in shares[home]:  # one by one: each takes a thread of the holder
                offer = await holder.replicate(part, self._config.timeout_s, others)
                add(part.header.part, offer, host)

        calls = {f"holder {home}": copy(home) for home in shares}
        outcome = await gather_named(calls, "replicate", self._config.connect_timeout_s)
        for name, error in outcome.failures.items():
            logger.warning("[%s] does not copy what engines of its host need: %s", name, error)
