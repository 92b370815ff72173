"""What the holders keep of the committed version, and how it gets there while engines already serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from weightsync.config import SyncConfig
from weightsync.connect import Connection
from weightsync.deadline import GRACE_S, gather_named
from weightsync.errors import DeadlineError, PeerLostError, WeightSyncError
from weightsync.keeper import Label, Share
from weightsync.peers import Fleet
from weightsync.readers import Offer
from weightsync.refill import Kept
from weightsync.verify import Digests

__all__ = ["Keeping"]

logger = logging.getLogger("weightsync.keeping")


class Keeping:
    """One committed version: each trainer's share is copied by its holder, then by mirrors elsewhere.

    Attributes:
        expected: its digests.
        on_silence: told when a holder did not answer.
    """

    def __init__(self, config: SyncConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._copying: asyncio.Task[None] | None = None
        self._mirroring: asyncio.Task[None] | None = None
        self._version = 0
        self._shares: dict[int, list[Offer]] = {}
        self._layout = ""
        self.expected: Digests | None = None
        self.on_silence: Callable[[], None] = lambda: None

    def begin(self, version: int, connection: Connection, expected: Digests) -> None:
        """`version` has committed, and the arenas still hold it: `copied` says until when they have to."""
        self._shares, self._version = {}, 0
        if self._config.keep_versions > 1 and not connection.in_place:
            self._copying = asyncio.create_task(self._copy(version, connection, expected))

    async def copied(self) -> None:
        """Until the arenas may be written again."""
        if self._copying:
            await asyncio.wait([self._copying], timeout=self._config.timeout_s)
            self._copying.cancel()

    async def settled(self) -> None:
        """Until mirrors have it too."""
        await self.copied()
        if self._mirroring:
            await asyncio.wait([self._mirroring])

    def kept(self, version: int, layout: str) -> Kept | None:
        """What there is of `version` by the plan whose content is `layout`: all of it, or None."""
        if (self._version, self._layout) != (version, layout) or not all(self._shares.values()):
            return None
        return Kept(version, layout, {trainer: tuple(offers) for trainer, offers in self._shares.items()})

    async def restore(self, connection: Connection) -> int:
        """Find what an earlier controller had kept: the newest version that is whole, or 0."""
        calls = {name: holder.kept() for name, holder in self._fleet.named_holders().items()}
        # Who is copying answers when it is done.
        outcome = await gather_named(calls, "kept", self._config.connect_timeout_s)
        found = [outcome.answers.get(name, []) for name in calls]
        layout = connection.content
        versions = {share.label.version for shares in found for share in shares}
        for version in sorted(versions, reverse=True):
            whole = [
                _of_trainer(Label(version, layout, trainer), [found[home], *found[:home], *found[home + 1 :]])
                for trainer, (_, home) in enumerate(self._fleet.trainers)
            ]
            if all(whole):
                self._shares = {t: [share.offer for share in shares] for t, shares in enumerate(whole)}
                self._version, self._layout, self.expected = version, layout, whole[0][0].expected
                return version
        return 0

    def lost(self, holder: str) -> None:
        """A holder is gone, with what it kept."""
        for trainer, offers in self._shares.items():
            self._shares[trainer] = [offer for offer in offers if offer.holder != holder]

    def _tell(self, error: WeightSyncError) -> None:
        if isinstance(error, (DeadlineError, PeerLostError)):
            self.on_silence()

    @property
    def _how(self) -> tuple[str, str]:
        return self._config.refill, self._config.rdma_device

    async def _copy(self, version: int, connection: Connection, expected: Digests) -> None:
        if self._mirroring:  # what it reads is about to be replaced
            self._mirroring.cancel()
        layout = connection.content
        calls = {
            f"holder {holder}": self._fleet.holders[holder].keep(version, layout, expected, *self._how)
            for _, holder in self._fleet.trainers
        }
        outcome = await gather_named(calls, "keep", self._config.timeout_s)
        for error in outcome.failures.values():
            logger.warning("version %d cannot be refilled from: %s", version, error)
            self._tell(error)
        if outcome.failures:
            return
        offers = list(outcome.answers.values())
        self._shares = {trainer: [offer] for trainer, offer in enumerate(offers)}
        self._version, self._layout, self.expected = version, layout, expected
        self._mirroring = asyncio.create_task(self._mirror(version, connection, offers, expected))

    async def _mirror(
        self, version: int, connection: Connection, offers: list[Offer], expected: Digests
    ) -> None:
        plan, nodes = connection.plan, [self._fleet.node(i) for i in range(len(self._fleet.holders))]
        for trainer, (_, home) in enumerate(self._fleet.trainers):
            share = Share(Label(version, self._layout, trainer), offers[trainer], expected)
            others = [i for i in range(len(nodes)) if nodes[i] != nodes[home]]
            for step in range(min(self._config.mirrors, len(others))):
                place = others[(trainer + step) % len(others)]
                call = self._fleet.holders[place].mirror(
                    share, plan.arena_nbytes(trainer), *self._how, self._config.timeout_s
                )
                limit_s = self._config.timeout_s + GRACE_S
                outcome = await gather_named({f"holder {place}": call}, "mirror", limit_s)
                for error in outcome.failures.values():
                    logger.warning("holder %d mirrors nothing of trainer %d: %s", place, trainer, error)
                    self._tell(error)
                if self._version == version:
                    self._shares[trainer] += outcome.answers.values()


def _of_trainer(label: Label, holders: Iterable[Iterable[Share]]) -> list[Share]:
    return [share for shares in holders for share in shares if share.label == label]
