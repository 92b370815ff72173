"""Rounds of publishing of real Ray actors, called by the driver or through holders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.actor import ActorHandle

from benchmarks.cluster import spawn
from benchmarks.driver_ledger import Instant
from benchmarks.driver_peers import PER_HOST
from benchmarks.isolate import stage
from benchmarks.rounds import NUM_WARM, dialled, measure
from weightsync.actors.holders.weight_holder import spawn_holder
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.publish_relay import PublishRelay
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer, remote_holder, remote_trainer
from weightsync.config import SyncConfig
from weightsync.driver.fleet import Fleet
from weightsync.driver.verifying.trainers import Trainers
from weightsync.protocol.messages import PublishReport, PublishTask
from weightsync.protocol.timing import Span

__all__ = ["measure_publishing"]


class IdleTrainer:
    """A trainer's actor that has published at once."""

    def sync_placement(self) -> Placement:
        return Placement.here()

    def sync_publish(self, task: PublishTask, ticket: int = 0, tells: bool = False) -> PublishReport:
        nothing = np.zeros(3, np.uint64)
        return PublishReport(nothing, nothing, {}, [Span("publish", 1.8e9, 0.01)])


class Rounds:
    """Trainers, and a holder for each group of 8 trainers, which is a host to the driver."""

    def __init__(self, num_trainers: int) -> None:
        self._num_trainers = num_trainers
        self._links = NodeLinks(None)
        self.trainers: list[RemoteTrainer] = []
        self.holders: list[RemoteHolder] = []

    def actors(self) -> Sequence[ActorHandle[Any]]:
        return [each.handle for each in (*self.trainers, *self.holders)]

    async def start(self) -> None:
        """Start as many actors at once as there are cores, since an actor starts a process."""
        at_once = len(os.sched_getaffinity(0))
        for first in range(0, self._num_trainers, at_once):
            stage(f"start of trainer {first}")
            ranks = range(first, min(first + at_once, self._num_trainers))
            new = [remote_trainer(f"trainer {rank}", spawn(IdleTrainer, num_threads=1)) for rank in ranks]
            self.trainers += new
            placements = await asyncio.gather(*(each.placement() for each in new))
        names = [f"holder {number}" for number in range(-(-self._num_trainers // PER_HOST))]
        for first in range(0, len(names), at_once):
            stage(f"start of {names[first]}")
            some = names[first : first + at_once]
            started = [
                remote_holder(name, spawn_holder(name, placements[0], "gloo", SyncConfig())) for name in some
            ]
            self.holders += started
            await asyncio.gather(*(holder.ready() for holder in started))

    async def take(self, num_rounds: int) -> dict[str, Sequence[Instant]]:
        """Publish in turns, both ways."""
        ranks = dict(enumerate(self.trainers))
        relays = [
            PublishRelay(holder, {rank: ranks[rank] for rank in ranks if rank // PER_HOST == number})
            for number, holder in enumerate(self.holders)
        ]
        await dialled(self._links, self.holders)
        while not all(relay.is_ready for relay in relays):
            await asyncio.sleep(0.01)
        stage("rounds")
        members = [(trainer, rank // PER_HOST) for rank, trainer in ranks.items()]
        fleets = {
            "Ray": Fleet([*members], {}, []),
            "holders": Fleet([*members], {}, [], relays=[*relays]),
        }
        config = SyncConfig(timeout_s=600.0)
        drivers = {way: Trainers(config, fleet) for way, fleet in fleets.items()}
        taken: dict[str, list[Instant]] = {way: [] for way in drivers}
        for version in range(1, num_rounds + NUM_WARM + 1):
            for way, driver in drivers.items():
                started = Instant.now()
                await driver.publish(version)
                taken[way].append(Instant.now() - started)
        await self._links.close()
        return {way: its[NUM_WARM:] for way, its in taken.items()}


def measure_publishing(num_trainers: int, num_rounds: int) -> None:
    """Let actors publish, called by the driver and by holders in turns, and send a row for both."""
    about: dict[str, object] = {"trainers": num_trainers, "groups": -(-num_trainers // PER_HOST)}
    measure(lambda: Rounds(num_trainers), num_rounds, "trainers that publish nothing", about)
