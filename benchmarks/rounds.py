"""Rounds of calls of real Ray actors, made in several ways in turns."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ray.actor import ActorHandle

from benchmarks.cluster import kill, start_ray
from benchmarks.driver_ledger import Instant
from benchmarks.isolate import emit
from weightsync.actors.ray.node_links import NodeLinks, Served

NUM_WARM = 2
"""Rounds of each way that are not counted."""


class Rounds(Protocol):
    """Actors, and the ways to call them."""

    def actors(self) -> Sequence[ActorHandle[Any]]:
        """Return all started actors."""

    async def start(self) -> None:
        """Start the actors."""

    async def take(self, num_rounds: int) -> dict[str, Sequence[Instant]]:
        """Return the time of each round, by way."""


async def dialled(links: NodeLinks, peers: Sequence[Served]) -> None:
    """Open the links to `peers`, and wait until their nodes have dialled."""
    for each in peers:
        links.open(each)
    await asyncio.gather(*(each.node.dialled() for each in peers if each.node))


def measure(make: Callable[[], Rounds], num_rounds: int, table: str, about: dict[str, object]) -> None:
    """Measure rounds, and send a row of `table` for each way. Rows have the columns of `about`."""
    start_ray(0)
    made: list[Rounds] = []

    async def work() -> dict[str, Sequence[Instant]]:
        made.append(make())
        await made[0].start()
        return await made[0].take(num_rounds)

    try:
        for way, its in asyncio.run(work()).items():
            wall, cpu = (
                statistics.median(getattr(each, name) for each in its) * 1e3 for name in ("wall", "cpu")
            )
            row = {"through": way, **about, "rounds": num_rounds, "round ms": wall, "driver's CPU ms": cpu}
            emit({"table": table, **row})
    finally:
        kill([actor for rounds in made for actor in rounds.actors()])
