"""Asks all trainers of a host with one message of the driver, through a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.ray.adoption import method_of
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer, answer
from weightsync.channel.wire import SentError
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerError, WeightSyncError
from weightsync.node.link import Link
from weightsync.node.messages import NodeOffer
from weightsync.protocol.messages import PublishReport, PublishTask

MAX_DIRECT_HOSTS = 8
"""If trainers are on more hosts, a holder on each host asks the trainers there.

A Ray call costs the driver 1.4 ms, so 8 hosts of 8 ranks cost it 90 ms, and 125 hosts 1.4 s. A message to a
holder, with the answers of 8 ranks, costs at most 1.8 ms: 0.23 s for 125 hosts. See
docs/decisions/0005-ray-calls-per-phase.md.
On few hosts relays are not worth the price: Ray keeps the calls of one process in order. So if the driver's
process asks trainers itself, they publish after the calls that this process submitted before.
"""

_Told: TypeAlias = tuple[dict[int, PublishReport], dict[int, SentError]]
"""Reports and errors, by rank."""


class HostPublishing(Protocol):
    """A holder that calls `publish` of all trainers on the same host."""

    async def publish_all(self, task: PublishTask, tickets: tuple[int, ...], timeout_s: float) -> _Told: ...


class PublishRelay:
    """The trainers of one host, which the driver asks together through a holder.

    Attributes:
        holder: the holder that asks the trainers.
        ranks: the ranks of the trainers.
        key: tells this relay from other relays.
    """

    protocol: type = HostPublishing
    node: Link | None = None

    def __init__(self, holder: RemoteHolder, trainers: Mapping[int, RemoteTrainer]) -> None:
        """`trainers`: the trainers of the holder's host, by rank."""
        self.name = f"trainers through {holder.name}"
        self.ranks: Sequence[int] = tuple(trainers)
        self.holder, self._trainers = holder, trainers
        self._actors = {rank: trainer.handle for rank, trainer in trainers.items()}
        self.key: Hashable = (holder.key, *self._actors.items())

    async def serve_node(self, offer: NodeOffer) -> None:
        """Have the holder answer calls of this relay. Raises as `answer`."""
        await self.holder.relay(offer, self._actors)

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        """Have all ranks publish. See `weightsync.protocol.peers.RelayPeer`."""
        if not (self.node and self.node.is_dialled):
            raise PeerError(self.name, "there is no connection to it")
        pairs = zip(self._trainers.values(), readable, strict=True)
        tickets = tuple(trainer.expect(each).ticket for trainer, each in pairs)
        told: _Told = await self.node.call("publish_all", task, tickets, timeout_s)
        reports, errors = told
        return [reports[rank] if rank in reports else errors[rank].rebuild() for rank in self.ranks]


class HostPublisher:
    """Has trainers publish, from another process than the driver's, see `HostPublishing`."""

    def __init__(self, trainers: Mapping[int, ActorHandle[Any]]) -> None:
        """`trainers`: the actors, by rank."""
        self._trainers = trainers

    async def publish_all(self, task: PublishTask, tickets: Sequence[int], timeout_s: float) -> _Told:
        """Return reports and errors by rank, in at most `timeout_s` seconds.

        Errors are those that the driver would get if it asked.
        """
        calls = {
            f"trainer {rank}": answer(f"trainer {rank}", method_of(actor, "sync_publish")(task, ticket))
            for (rank, actor), ticket in zip(self._trainers.items(), tickets, strict=True)
        }
        outcome = await gather_named(calls, "publish", timeout_s)
        ranks = dict(zip(calls, self._trainers, strict=True))
        errors = {ranks[name]: SentError.of(error) for name, error in outcome.failures.items()}
        return {ranks[name]: report for name, report in outcome.answers.items()}, errors


class PublishRelays:
    """The relays in use, with their links."""

    def __init__(self, links: NodeLinks, fleet: Fleet) -> None:
        self._links, self._fleet = links, fleet
        self._used: Sequence[PublishRelay] = ()

    def use(self, relays: Sequence[PublishRelay]) -> None:
        """Ask trainers through these relays from now on."""
        for gone in {each.key for each in self._used} - {each.key for each in relays}:
            self._links.end(gone, PeerError("a relay", "it is not used any more"))
        for relay in relays:
            self._links.open(relay)
        self._used = relays
        self._fleet.relays[:] = relays

    def lost(self, holder: RemoteHolder, error: WeightSyncError) -> None:
        """End the links of relays through a holder that has ended."""
        for relay in self._used:
            if relay.holder is holder:
                self._links.end(relay.key, error)


def publish_relays(
    trainers: Sequence[RemoteTrainer], nodes: Sequence[str], holders: Sequence[RemoteHolder]
) -> list[PublishRelay]:
    """Return the relays of trainers, with hosts and holders. None if there are few hosts."""
    return [
        PublishRelay(holders[ranks[0]], {rank: trainers[rank] for rank in ranks})
        for ranks in relayed_ranks(nodes)
    ]


def relayed_ranks(nodes: Sequence[str]) -> list[list[int]]:
    """Group the ranks that are asked through relays by their hosts, of which `nodes` has one for each rank.

    There are no groups where at most `MAX_DIRECT_HOSTS` hosts have some.
    """
    by_host: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return [*by_host.values()] if len(by_host) > MAX_DIRECT_HOSTS else []
