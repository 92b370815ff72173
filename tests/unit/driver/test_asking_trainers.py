"""Trainers are asked directly or by relays: each is heard once, in rank order, and fails under its name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.verifying.trainers import Trainers
from weightsync.errors import PeerError, PeerLostError, WeightSyncError
from weightsync.protocol.messages import PublishReport, PublishTask
from weightsync.protocol.peers import TrainerPeer

NUM_RANKS = 6


class Rank:
    def __init__(self, rank: int, fails: bool) -> None:
        self._rank, self._fails = rank, fails
        self.asked = list[str]()

    def say(self, by: str) -> PublishReport | WeightSyncError:
        self.asked.append(by)
        if self._fails:
            return PeerError(f"trainer {self._rank}", "no memory")
        digest = np.array([1 << self._rank, 0], np.uint64)
        return PublishReport(digest, digest, {}, ())

    def ask_readable(self, readable: asyncio.Future[None]) -> None: ...

    async def publish(self, task: PublishTask, readable: asyncio.Future[None]) -> PublishReport:
        said = self.say("driver")
        if isinstance(said, WeightSyncError):
            raise said
        return said


class Relay:
    def __init__(self, name: str, ranks: Mapping[int, Rank], dies: bool) -> None:
        self.name, self._ranks, self.dies = name, ranks, dies
        self.ranks: Sequence[int] = tuple(ranks)

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        assert len(readable) == len(self.ranks)
        said = [rank.say("relay") for rank in self._ranks.values()]
        if self.dies:
            raise PeerLostError(self.name, "killed")
        return said


@given(
    st.lists(st.sampled_from(["driver", "h0", "h1"]), min_size=NUM_RANKS, max_size=NUM_RANKS),
    st.sets(st.sampled_from(["h0", "h1"])),
    st.none() | st.integers(0, NUM_RANKS - 1),
)
def test_each_rank_is_heard_whoever_asks_it(by: Sequence[str], dead: set[str], failing: int | None) -> None:
    ranks = [Rank(rank, rank == failing) for rank in range(NUM_RANKS)]
    relays = [
        Relay(host, {rank: ranks[rank] for rank in range(NUM_RANKS) if by[rank] == host}, host in dead)
        for host in sorted({*by} - {"driver"})
    ]
    fleet = Fleet([(cast("TrainerPeer", rank), 0) for rank in ranks], {}, [], relays=[*relays])

    async def work() -> None:
        publication = await Trainers(SyncConfig(), fleet).publish(1)
        assert [*publication.answers] == [f"trainer {rank}" for rank in range(NUM_RANKS)]
        assert publication.fingerprint.tolist() == [(1 << NUM_RANKS) - 1, 0]

    if failing is None:
        asyncio.run(work())
    else:
        with pytest.raises(PeerError, match=f"^trainer {failing} failed: no memory"):
            asyncio.run(work())
    for rank, asker in zip(ranks, by, strict=True):
        assert rank.asked == {"driver": ["driver"]}.get(asker, ["relay"] + ["driver"] * (asker in dead))
