"""Asks all trainers of a host with one message of the driver, through a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.ray.control_channels import ControlChannel
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer, answer
from weightsync.channel.control import ControlOffer
from weightsync.channel.wire import SentError
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerError, WeightSyncError
from weightsync.protocol.messages import PublishReport, PublishTask

_Told: TypeAlias = tuple[dict[int, PublishReport], dict[int, SentError]]
"""Reports and errors, by rank."""


class PublishRelay:
    """The trainers of one host, which the driver asks together by a channel to a holder.

    Attributes:
        ranks: the ranks of the trainers.
        key: tells this relay from other relays.
    """

    channel: ControlChannel | None = None

    def __init__(self, holder: RemoteHolder, trainers: Mapping[int, RemoteTrainer]) -> None:
        """`trainers`: the trainers of the holder's host, by rank."""
        self.name = f"trainers through {holder.name}"
        self.ranks: Sequence[int] = tuple(trainers)
        self._holder, self._trainers = holder, trainers
        self._actors = {rank: trainer.handle for rank, trainer in trainers.items()}
        self.key: Hashable = (holder.key, *self._actors.items())

    def answers(self, method: str) -> bool:
        """Return True: each holder's process can relay calls."""
        return True

    async def answer_calls(self, offer: ControlOffer) -> None:
        """Have the holder relay calls of the channel, until the channel is lost. Raises as `answer`."""
        await self._holder.relay(offer, self._actors)

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        """Have all ranks publish. See `weightsync.protocol.peers.RelayPeer`."""
        if self.channel and self.channel.stuck:
            await self.channel.channels.replace(self)
        pairs = zip(self._trainers.values(), readable, strict=True)
        tickets = tuple(t.notices.expect(each) if t.notices else 0 for t, each in pairs)
        called = self.channel.call("publish_all", (task, tickets, timeout_s)) if self.channel else None
        if called is None:
            raise PeerError(self.name, "there is no connection to it")
        told: _Told = await called
        reports, errors = told
        return [reports[rank] if rank in reports else errors[rank].rebuild() for rank in self.ranks]


def publish_all(
    actors: Mapping[int, ActorHandle[Any]], task: PublishTask, tickets: Sequence[int], timeout_s: float
) -> _Told:
    """Have trainers publish, from another process than the driver's. Returns reports and errors, by rank.

    Waits for at most `timeout_s` seconds. Errors are those that the driver would get if it asked.
    """

    async def work() -> _Told:
        calls = {
            f"trainer {rank}": answer(f"trainer {rank}", actor.sync_publish.remote(task, ticket))
            for (rank, actor), ticket in zip(actors.items(), tickets, strict=True)
        }
        outcome = await gather_named(calls, "publish", timeout_s)
        ranks = dict(zip(calls, actors, strict=True))
        errors = {ranks[name]: SentError.of(error) for name, error in outcome.failures.items()}
        return {ranks[name]: report for name, report in outcome.answers.items()}, errors

    return asyncio.run(work())
