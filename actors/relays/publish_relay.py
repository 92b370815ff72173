"""Asks all trainers of a host with one message of the driver, through a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.ray.adoption import Adoption, method_of
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer, answer
from weightsync.channel.wire import SentError
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerError, WeightSyncError
from weightsync.node.link import Link
from weightsync.node.messages import NodeOffer
from weightsync.protocol.messages import PublishReport, PublishTask

_Told: TypeAlias = tuple[dict[int, PublishReport], dict[int, SentError]]
"""Reports and errors, by rank."""

TrainerActors: TypeAlias = Mapping[int, tuple[ActorHandle[Any], Adoption | None]]
"""Trainers, and how each was adopted, by rank."""


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
        self._actors = {rank: (trainer.handle, trainer.adoption) for rank, trainer in trainers.items()}
        self.key: Hashable = (holder.key, *((rank, trainer.key) for rank, trainer in trainers.items()))

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
        tickets = tuple(trainer.expect(each) for trainer, each in pairs)
        told: _Told = await self.node.call("publish_all", task, tickets, timeout_s)
        reports, errors = told
        return [reports[rank] if rank in reports else errors[rank].rebuild() for rank in self.ranks]


class HostPublisher:
    """Has trainers publish, from another process than the driver's, see `HostPublishing`."""

    def __init__(self, trainers: TrainerActors) -> None:
        self._trainers = trainers

    async def publish_all(self, task: PublishTask, tickets: Sequence[int], timeout_s: float) -> _Told:
        """Return reports and errors by rank, in at most `timeout_s` seconds.

        Errors are those that the driver would get if it asked.
        """
        calls = {
            f"trainer {rank}": answer(f"trainer {rank}", method_of(actor, "sync_publish", how)(task, ticket))
            for (rank, (actor, how)), ticket in zip(self._trainers.items(), tickets, strict=True)
        }
        outcome = await gather_named(calls, "publish", timeout_s)
        ranks = dict(zip(calls, self._trainers, strict=True))
        errors = {ranks[name]: SentError.of(error) for name, error in outcome.failures.items()}
        return {ranks[name]: report for name, report in outcome.answers.items()}, errors
