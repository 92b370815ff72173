"""Trainer ranks that Ray did not start, as the driver calls them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.handle import Joined
from weightsync.actors.servers.peers import ServedTrainer
from weightsync.driver.gather import GRACE_S, gather_named
from weightsync.errors import PeerLostError, StateError, WeightSyncError
from weightsync.node.link import Link

logger = logging.getLogger("weightsync.actors")


class JoinedRank(Joined):
    """A trainer rank that Ray did not start.

    Attributes:
        is_updating: True during an update. A component that is updated with another one does not end it.
    """

    _protocol = ServedTrainer
    is_updating = False

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __repr__(self) -> str:
        return f"trainer {self.rank}"

    async def placement(self, part: str = "") -> Placement:
        """Return the placement of the rank, or of a part, as the driver uses it, once it is in `update`."""
        return self._placed([await self._waited_for("placement", part)])[0]

    async def begin(self) -> None:
        """Wait until the rank is in `update`."""
        await self._waited_for("begin")

    async def _waited_for(self, method: str, part: str = "") -> Any:  # noqa: ANN401 - its answer
        """Call a method, of the next process if this one ends."""
        while True:
            try:
                return await self._call(method, part=part)
            except PeerLostError as error:
                logger.warning("[%s] waiting until it joins again: %s", self, error)
                self.expect(self.link.name, self.link.again_s)


TrainerHandle: TypeAlias = ActorHandle[Any] | JoinedRank


@asynccontextmanager
async def in_update(
    ranks: Mapping[str, JoinedRank],
    version: Callable[[], int],
    timeout_s: float,
    connected: Callable[[], Mapping[str, Link]],
) -> AsyncIterator[None]:
    """Have all `ranks` in `update` during the body. Afterwards they return the new `version`, or raise.

    Ranks that are in one already stay in it. `connected` returns the links that the update uses.

    Raises a DeadlineError that names the ranks which do not come in `timeout_s` seconds.
    """
    ranks = {name: rank for name, rank in ranks.items() if not rank.is_updating}
    before, links = version(), {name: rank.link for name, rank in ranks.items()}
    error: WeightSyncError | None = StateError("the update failed")  # or one that was to commit with it
    for rank in ranks.values():
        rank.is_updating = True
    try:
        begun = await gather_named(
            {name: rank.begin() for name, rank in ranks.items()}, "update()", timeout_s
        )
        # A process that takes a rank's place from now on is in no update, and is not told of an end, unless
        # the update connects it.
        links = {name: rank.link for name, rank in ranks.items()}
        begun.require()
        yield
        if version() > before:
            error = None
    except WeightSyncError as raised:
        error = raised
        raise
    finally:
        for rank in ranks.values():
            rank.is_updating = False
        links |= {name: link for name, link in connected().items() if name in ranks and not link.has_ended}
        told = {name: link.call("end", version(), error) for name, link in links.items()}
        for name in (await gather_named(told, "end", GRACE_S)).failures:
            links[name].end(
                PeerLostError(name, "it was not told how an update ended")
            )  # it learns that by itself
