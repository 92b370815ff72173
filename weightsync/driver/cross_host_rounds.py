"""What engine ranks need of trainers on other hosts: planned and connected once, for all engines together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

import numpy as np

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import ConfigError
from weightsync.plan import Plan, Reads
from weightsync.plan.cross_host import arrivals, bundles
from weightsync.plan.shuffle import ShufflePlan
from weightsync.protocol.messages import Part

__all__ = ["Crossing"]

_NUM_SLOTS = 4
"""Two of what a holder sends, two of what it receives."""


class Crossing:
    """Messages between holders, in one communicator.

    Attributes:
        members: the holder of each of its ranks: first those that serve trainers.
    """

    def __init__(self, fleet: Fleet, config: SyncConfig, plan: Plan, needs: Mapping[int, Reads]) -> None:
        """`needs`, by holder, are the reads of trainers on other hosts. `plan` has its staging memory too.

        Raises ConfigError when ``sync.max_staging_bytes`` leaves no room for messages.
        """
        self._fleet, self._config, self._needs = fleet, config, dict(needs)
        read = sorted({t for reads in needs.values() for t in np.unique(reads.trainer).tolist()})
        givers = [fleet.trainers[trainer][1] for trainer in read]
        self.members = (*givers, *sorted(needs.keys() - set(givers)))
        rank_of = {holder: rank for rank, holder in enumerate(self.members)}
        staged = max((plan.staging_nbytes(holder) for holder in self.members), default=0)
        most = min(config.bucket_bytes, (config.max_staging_bytes - staged) // _NUM_SLOTS)
        dealt = bundles(
            {rank_of[holder]: reads for holder, reads in needs.items()},
            {rank_of[holder]: fleet.node(holder) for holder in needs},
            {trainer: rank for rank, trainer in enumerate(read)},
        )
        self._arrivals: dict[int, dict[tuple[str, int], int]] = {}
        for rank, (packed, passed_on) in arrivals(dealt).items():
            sent = {(f"trainer {read[giver]}", givers[giver]): nbytes for giver, nbytes in packed.items()}
            more = {(f"holder {(at := self.members[giver])}", at): n for giver, n in passed_on.items()}
            self._arrivals[self.members[rank]] = sent | more
        try:
            self._plan = ShufflePlan.from_bundles(dealt, len(givers), max_message_bytes=most)
        except ConfigError as error:
            raise ConfigError(
                "sync.max_staging_bytes",
                config.max_staging_bytes,
                f"{staged} of it are for buckets, and {_NUM_SLOTS} messages between hosts of {most} bytes "
                f"are too small: {error.remedy}",
            ) from error

    def agrees(self, holders: Collection[int], needs: Mapping[int, Reads]) -> bool:
        """Whether it brings `holders` just what they need now, and nothing to those without `needs`."""
        return all(_same(self._needs.get(holder), needs.get(holder)) for holder in holders)

    def arrivals(self, holder: int) -> Mapping[tuple[str, int], int]:
        """What comes to a holder in one update: bytes by trainer or holder, and the holder it is on."""
        return self._arrivals.get(holder, {})

    async def open(self) -> None:
        """Every member takes its memory and meets the others, once all have. Raises as `connect` does."""
        if not self.members:
            return
        named = {f"holder {each}": self._fleet.holders[each] for each in self.members}
        takes = {
            who: holder.exchange(Part(self.members, rank, self._plan.of(rank)))
            for rank, (who, holder) in enumerate(named.items())
        }
        timeout_s = self._config.connect_timeout_s
        offers = (await gather_named(takes, "exchange", timeout_s)).require()
        (offer,) = filter(None, offers.values())
        # The communicator keeps this deadline for every message.
        meets = {who: holder.meet(offer, self._config.timeout_s) for who, holder in named.items()}
        (await gather_named(meets, "meet", timeout_s)).require()


def _same(ours: Reads | None, theirs: Reads | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    names = (column.name for column in fields(Reads))
    return all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in names)
