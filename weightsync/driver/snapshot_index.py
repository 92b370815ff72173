"""What the holders keep of the committed version, and how it gets there while engines already serve."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from weightsync.config import SyncConfig
from weightsync.driver.connect import Connection
from weightsync.driver.engine_state import EngineState
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import DeadlineError, PeerLostError, WeightSyncError
from weightsync.protocol.handles import Offer
from weightsync.protocol.messages import Digests, Kept, Label, Share

__all__ = ["Keeping"]

logger = logging.getLogger("weightsync.driver.snapshot_index")


@dataclass(slots=True)
class _Version:
    """Offers of each part of a version, by layout and the part's number."""

    number: int = 0
    offers: defaultdict[str, dict[int, list[Offer]]] = field(default_factory=lambda: defaultdict(dict))


class Keeping:
    """One committed version, in parts, each copied by a holder, then by mirrors on other hosts.

    A part is what a trainer rank published or, where trainers' memory is read in place, what an
    engine rank serves.

    Attributes:
        expected: its digests.
        on_silence: told when a holder did not answer.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._copying: asyncio.Task[None] | None = None
        self._mirroring: asyncio.Task[None] | None = None
        self._now = _Version()
        self.expected: Digests | None = None
        self.on_silence: Callable[[], None] = lambda: None

    async def reserve(self, connection: Connection) -> None:
        """Have the holders that are to copy take the memory for it: page-locking takes a second for 2 GB."""
        if self._config.keep_versions < 2:
            return
        parts = {
            home: label.part for label, homes in self._parts(0, connection, everyone=True) for home in homes
        }
        calls = {
            f"holder {home}": self._fleet.holders[home].reserve(part, connection.in_place)
            for home, part in parts.items()
        }
        outcome = await gather_named(calls, "prepare", self._config.connect_timeout_s)
        for error in outcome.failures.values():
            logger.warning("not all of a version can be kept: %s", error)
            self._tell(error)
        if self._config.refill == "auto":
            offers = {home: outcome.answers.get(f"holder {home}") for home in parts}
            await self._map(connection, {(parts[home], home): o for home, o in offers.items() if o})

    async def _map(self, connection: Connection, offers: Mapping[tuple[int, int], Offer]) -> None:
        """Engines of one host that serve the same are filled from one copy: see `Keeper.map`."""
        calls = {}
        for name, image in connection.images.items():
            for part, holder in enumerate(self._fleet.engines[name].holders, start=image.first):
                for (kept, home), offer in offers.items():
                    near = self._fleet.node(home) == self._fleet.node(holder)
                    if kept == part and near and (part, holder) not in offers:
                        calls[f"holder {holder}"] = self._fleet.holders[holder].map(part, offer)
        outcome = await gather_named(calls, "map", self._config.connect_timeout_s)
        for error in outcome.failures.values():
            logger.warning("a copy on this host is not mapped: %s", error)
            self._tell(error)

    def begin(self, version: int, connection: Connection, expected: Digests) -> None:
        """`version` has committed, and what is copied still holds it: `copied` says until when it has to."""
        self._now = _Version()
        if self._config.keep_versions > 1 and (connection.images or not connection.in_place):
            self._copying = asyncio.create_task(self._copy(version, connection, expected))

    async def copied(self) -> None:
        """Until arenas and engines may be written again."""
        if self._copying:
            await asyncio.wait([self._copying], timeout=self._config.timeout_s)
            self._copying.cancel()

    async def settled(self) -> None:
        """Until mirrors have it too."""
        await self.copied()
        if self._mirroring:
            await asyncio.wait([self._mirroring])

    async def stop(self) -> None:
        """What is being copied will be of no use."""
        tasks = [task for task in (self._copying, self._mirroring) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kept(self, version: int, connection: Connection, engine: str) -> Kept | None:
        """What there is of `version` that `engine` can be filled with: all of it, or None."""
        image = connection.images.get(engine)
        if version != self._now.number or (connection.in_place and not image):
            return None
        layout = image.layout if image else connection.content
        parts = self._now.offers.get(layout, {})
        if not parts or not all(parts.values()):
            return None
        return Kept(version, layout, {number: tuple(offers) for number, offers in parts.items()}, bool(image))

    async def restore(self, connection: Connection) -> int:
        """Find what an earlier controller had kept: the newest version that is whole, or 0."""
        calls = {name: holder.kept() for name, holder in self._fleet.named_holders().items()}
        # Who is copying answers when it is done.
        outcome = await gather_named(calls, "kept", self._config.connect_timeout_s)
        found = {
            who: {share.label: share for share in outcome.answers.get(name, ())}
            for who, name in enumerate(calls)
        }
        versions = {label.version for shares in found.values() for label in shares}
        for version in sorted(versions, reverse=True):
            now = _Version(version)
            for label, homes in self._parts(version, connection, everyone=True):
                order = [*homes, *(found.keys() - set(homes))]
                shares = [found[who][label] for who in order if label in found[who]]
                now.offers[label.layout][label.part] = [share.offer for share in shares]
                if shares:
                    self.expected = shares[0].expected
            if any(all(parts.values()) for parts in now.offers.values()):
                self._now = now
                return version
        return 0

    def lost(self, holder: str) -> None:
        """A holder is gone, with what it kept."""
        for parts in self._now.offers.values():
            for number, offers in parts.items():
                parts[number] = [offer for offer in offers if offer.holder != holder]

    def _parts(
        self, version: int, connection: Connection, everyone: bool = False
    ) -> Iterator[tuple[Label, list[int]]]:
        """Each part, and the holders that are to copy it: more than one if engines on several hosts serve it.

        `everyone`: not only of engines that serve `version`.
        """
        if not connection.in_place:
            for trainer, (_, home) in enumerate(self._fleet.trainers):
                yield Label(version, connection.content, trainer), [home]
            return
        for image in dict.fromkeys(connection.images.values()):
            hosts: dict[str, tuple[int, ...]] = {}
            for name, seat in self._fleet.engines.items():
                serves = (seat.record.state, seat.record.version) == (EngineState.SERVING, version)
                if connection.images.get(name) == image and (everyone or serves):
                    hosts.setdefault(self._fleet.node(seat.holders[0]), seat.holders)
            copies = [*hosts.values()][: self._config.mirrors + 1]
            for rank, homes in enumerate(zip(*copies, strict=True)):
                yield Label(version, image.layout, image.first + rank), list(homes)

    async def _copy(self, version: int, connection: Connection, expected: Digests) -> None:
        if self._mirroring:  # what it reads is about to be replaced
            self._mirroring.cancel()
        parts = [(label, home) for label, homes in self._parts(version, connection) for home in homes]
        calls = {
            f"holder {home}": self._fleet.holders[home].keep(label, connection.in_place, expected)
            for label, home in parts
        }
        outcome = await gather_named(calls, "keep", self._config.timeout_s)
        for error in outcome.failures.values():
            logger.warning("some of version %d cannot be refilled from: %s", version, error)
            self._tell(error)
        now = _Version(version)
        homes: dict[Label, list[int]] = {}
        for label, home in parts:
            offers = now.offers[label.layout].setdefault(label.part, [])
            if offer := outcome.answers.get(f"holder {home}"):
                offers.append(offer)
                homes.setdefault(label, []).append(home)
        self._now, self.expected = now, expected
        num_planned = connection.plan.members.num_holders  # who came since then lends nothing
        self._mirroring = asyncio.create_task(self._mirror(now, homes, num_planned, expected))

    async def _mirror(
        self, now: _Version, homes: dict[Label, list[int]], num_holders: int, expected: Digests
    ) -> None:
        nodes = [self._fleet.node(i) for i in range(num_holders)]
        for label, keep in homes.items():
            held = {self._fleet.node(home) for home in keep}
            others = [i for i in range(num_holders) if nodes[i] not in held]
            offers = now.offers[label.layout][label.part]
            if not offers:
                continue  # its holder was lost meanwhile
            share = Share(label, offers[0], expected)
            for step in range(min(self._config.mirrors + 1 - len(held), len(others))):
                place = others[(label.part + step) % len(others)]
                call = self._fleet.holders[place].mirror(share, self._config.timeout_s)
                limit_s = self._config.timeout_s + GRACE_S
                outcome = await gather_named({f"holder {place}": call}, "mirror", limit_s)
                for error in outcome.failures.values():
                    logger.warning("holder %d mirrors nothing of part %d: %s", place, label.part, error)
                    self._tell(error)
                now.offers[label.layout][label.part] += outcome.answers.values()

    def _tell(self, error: WeightSyncError) -> None:
        if isinstance(error, (DeadlineError, PeerLostError)):
            self.on_silence()
