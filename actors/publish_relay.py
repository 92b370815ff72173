"""Asks all trainers of a host with one message of the driver, through a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.control_channels import ControlChannel, ControlChannels, ticket_of
from weightsync.actors.remote import RemoteHolder, RemoteTrainer, answer
from weightsync.channel.control import ControlOffer
from weightsync.channel.wire import SentError
from weightsync.driver.fleet import Fleet
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerError, WeightSyncError
from weightsync.protocol.messages import PublishReport

_Told: TypeAlias = tuple[dict[int, PublishReport], dict[int, SentError]]
"""Reports and errors, by rank."""

MAX_DIRECT_HOSTS = 8
"""Where trainers are on more hosts than that, a holder of each host asks its trainers.

A Ray call costs the driver 1.4 ms, so 8 hosts of 8 ranks cost it 90 ms, and 125 hosts 1.4 s. A message to a
holder, with the answers of 8 ranks, costs at most 1.8 ms: 0.23 s for 125 hosts. benchmarks/README.md has the
figures. On few hosts it is not worth what it takes: Ray keeps the calls of one process in order, so trainers
that the driver's process asks itself publish after what that process had submitted to them before.
"""


class PublishRelay:
    """The trainers of one host, as the driver asks them together, and its channel to the holder that does it.

    Attributes:
        ranks: those of the trainers.
        key: tells it from other relays.
    """

    channel: ControlChannel | None = None

    def __init__(self, holder: RemoteHolder, trainers: Mapping[int, RemoteTrainer]) -> None:
        """`trainers`: those of the holder's host, by rank."""
        self.name = f"trainers through {holder.name}"
        self.ranks: Sequence[int] = tuple(trainers)
        self._holder, self._trainers = holder, trainers
        self._actors = {rank: trainer.handle for rank, trainer in trainers.items()}
        self.key: Hashable = (holder.key, *self._actors.items())

    def answers(self, method: str) -> bool:
        """Whether the holder's process can relay calls."""
        return method == "answer_calls" and self._holder.answers("relay")

    async def answer_calls(self, offer: ControlOffer) -> None:
        """Have the holder relay what comes by the channel, until it is lost. Raises as `answer`."""
        await self._holder.relay(offer, self._actors)

    async def publish(
        self, count: bool, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        """Have all ranks publish. See `weightsync.protocol.peers.RelayPeer`."""
        if self.channel and self.channel.stuck:
            await self.channel.channels.replace(self)
        pairs = zip(self._trainers.values(), readable, strict=True)
        tickets = tuple(ticket_of(trainer.notices, each) for trainer, each in pairs)
        called = self.channel.call("publish_all", (count, tickets, timeout_s)) if self.channel else None
        if called is None:
            raise PeerError(self.name, "there is no connection to it")
        told: _Told = await called
        reports, errors = told
        return [reports[rank] if rank in reports else errors[rank].rebuild() for rank in self.ranks]


class Relays:
    """The relays in use, each with a control channel."""

    def __init__(self, channels: ControlChannels, fleet: Fleet) -> None:
        self._channels, self._fleet = channels, fleet
        self._used: Sequence[PublishRelay] = ()

    def use(self, relays: Sequence[PublishRelay]) -> None:
        """Have trainers be asked through `relays`, and no longer through others."""
        for gone in {each.key for each in self._used} - {each.key for each in relays}:
            self._channels.forget(gone)
        for relay in relays:
            self._channels.open(relay)
        self._used = relays
        self._fleet.relays[:] = relays


def publish_all(
    actors: Mapping[int, ActorHandle[Any]], count: bool, tickets: Sequence[int], timeout_s: float
) -> _Told:
    """Have trainers publish, from another process than the driver's. Returns reports and errors, by rank.

    Waits for at most `timeout_s` seconds. Errors are those that the driver would get if it asked.
    """

    async def work() -> _Told:
        calls = {
            f"trainer {rank}": answer(f"trainer {rank}", actor.sync_publish.remote(count, ticket))
            for (rank, actor), ticket in zip(actors.items(), tickets, strict=True)
        }
        outcome = await gather_named(calls, "publish", timeout_s)
        ranks = dict(zip(calls, actors, strict=True))
        errors = {ranks[name]: SentError.of(error) for name, error in outcome.failures.items()}
        return {ranks[name]: report for name, report in outcome.answers.items()}, errors

    return asyncio.run(work())


def relays_of(
    trainers: Sequence[RemoteTrainer], nodes: Sequence[str], holders: Sequence[RemoteHolder]
) -> list[PublishRelay]:
    """Return the relays of trainers, each with its host and its holder. None if the hosts are few."""
    return [
        PublishRelay(holders[ranks[0]], {rank: trainers[rank] for rank in ranks})
        for ranks in relayed_ranks(nodes)
    ]


def relayed_ranks(nodes: Sequence[str]) -> list[list[int]]:
    """Group the ranks that are asked through relays by their hosts, of which `nodes` has one for each rank.

    There are no groups where at most `MAX_DIRECT_HOSTS` hosts have trainers.
    """
    by_host: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return [*by_host.values()] if len(by_host) > MAX_DIRECT_HOSTS else []
