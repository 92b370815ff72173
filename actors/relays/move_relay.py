"""Has all holders of a host move with one message of the driver, through a holder there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, TypeAlias

from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteHolder
from weightsync.channel.wire import SentError
from weightsync.errors import PeerError, WeightSyncError
from weightsync.node.link import Link
from weightsync.node.messages import NodeOffer
from weightsync.protocol.messages import Moved, UpdateTask

HostTasks: TypeAlias = tuple[tuple[UpdateTask, tuple[int, ...]], ...]
"""Tasks, and the holders of each task. Most holders of a host have equal tasks."""

HostMoved: TypeAlias = tuple[dict[int, Moved], dict[int, SentError], tuple[int, ...]]
"""Outcomes and errors by holder, and the holders that could not be called."""


class HostMoving(Protocol):
    """A holder that has the holders of its host move.

    `move_all` begins an attempt. It and `moved` return what is new of the holders.
    """

    async def move_all(self, attempt: int, tasks: HostTasks, timeout_s: float) -> HostMoved: ...
    async def moved(self) -> HostMoved: ...


class MoveRelay:
    """The holders of one host, as the driver calls them together. The first of them calls the others.

    See `weightsync.protocol.peers.MoveRelayPeer`.

    Attributes:
        holder: the holder that calls the others.
        holders: the indices of all.
        key: tells this relay from other relays.
    """

    protocol: type = HostMoving
    node: Link | None = None

    def __init__(self, links: NodeLinks, holders: Mapping[int, RemoteHolder]) -> None:
        """`holders`: the holders of the host, by index."""
        self.holders: Sequence[int] = tuple(holders)
        self._links, self.holder = links, holders[self.holders[0]]
        self._actors = {index: holder.handle for index, holder in holders.items()}
        self.name = f"holders through {self.holder.name}"
        self.key: Hashable = ("move", *self._actors.items())

    async def serve_node(self, offer: NodeOffer) -> None:
        """Have the holder answer calls of this relay. Raises as `answer`."""
        await self.holder.relay_moves(offer, self._actors)

    def renew(self) -> None:
        """Make a new link. The holder then makes new links to its neighbours."""
        self._links.end(self.key, PeerError(self.name, "its link was renewed"))
        self._links.open(self)

    async def move(
        self, attempt: int, tasks: Mapping[int, UpdateTask], timeout_s: float
    ) -> Mapping[int, Moved | WeightSyncError | None]:
        """Have holders move, by index. None could be called while the connection is being made."""
        if not (self.node and self.node.is_dialled):
            self._links.open(self)  # another link, if the link has ended
            return dict.fromkeys(tasks)
        alike: dict[UpdateTask, list[int]] = {}
        for index, task in tasks.items():
            alike.setdefault(task, []).append(index)
        asked = tuple((task, tuple(its)) for task, its in alike.items())
        return _said(await self.node.call("move_all", attempt, asked, timeout_s))

    async def moved(self) -> Mapping[int, Moved | WeightSyncError | None]:
        """Return new results of holders that move."""
        if self.node is None:
            raise PeerError(self.name, "there is no connection to it")
        return _said(await self.node.call("moved"))


def _said(answer: HostMoved) -> Mapping[int, Moved | WeightSyncError | None]:
    moved, errors, uncalled = answer
    return {**moved, **{i: error.rebuild() for i, error in errors.items()}, **dict.fromkeys(uncalled)}
