"""Asks all trainers of a host with one message of the driver, through a holder there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ray.actor import ActorHandle

from weightsync.actors.ray.adoption import Adoption, method_of
from weightsync.actors.ray.publish_notices import Told
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer, answer
from weightsync.actors.servers.handle import no_log
from weightsync.channel.wire import SentError
from weightsync.driver.gather import gather_named
from weightsync.errors import PeerError, WeightSyncError
from weightsync.protocol.messages import PublishReport, PublishTask

TrainerActors: TypeAlias = Mapping[int, tuple[ActorHandle[Any], Adoption | None]]
"""Trainers, and how each was adopted, by rank."""

MAX_DIRECT_HOSTS = 8
"""If trainers are on more hosts, a holder on each host asks the trainers there.

A Ray call costs the driver 1.4 ms, so 8 hosts of 8 ranks cost it 90 ms, and 125 hosts 1.4 s. A message to a
holder, with the answers of 8 ranks, costs at most 1.8 ms: 0.23 s for 125 hosts. See
docs/decisions/0005-ray-calls-per-phase.md.
On few hosts relays are not worth the price: Ray keeps the calls of one process in order. So if the driver's
process asks trainers itself, they publish after the calls that this process submitted before.
"""


class PublishRelay:
    """The trainers of one host, which the driver asks together through a holder.

    Attributes:
        ranks: the ranks of the trainers.
    """

    def __init__(self, holder: RemoteHolder, trainers: Mapping[int, RemoteTrainer]) -> None:
        """Tell the holder in the background. `trainers`: the trainers of the holder's host, by rank."""
        self.name = f"trainers through {holder.name}"
        self.ranks: Sequence[int] = tuple(trainers)
        self._holder, self._trainers = holder, trainers
        actors = {rank: (trainer.handle, trainer.adoption) for rank, trainer in trainers.items()}
        self._telling = asyncio.ensure_future(holder.relay(actors))
        self._telling.add_done_callback(no_log)

    @property
    def is_ready(self) -> bool:
        """Return True if the holder can be asked."""
        is_told = self._telling.done() and not self._telling.cancelled() and not self._telling.exception()
        return is_told and self._holder.node is not None and self._holder.node.is_dialled

    async def publish(
        self, task: PublishTask, readable: Sequence[asyncio.Future[None]], timeout_s: float
    ) -> Sequence[PublishReport | WeightSyncError]:
        """Have all ranks publish. See `weightsync.protocol.peers.RelayPeer`."""
        if not self.is_ready:
            raise PeerError(self.name, "there is no connection to it")
        pairs = zip(self._trainers.values(), readable, strict=True)
        tickets = tuple(trainer.expect(each).ticket for trainer, each in pairs)
        reports, errors = await self._holder.publish_all(task, tickets, timeout_s)
        return [reports[rank] if rank in reports else errors[rank].rebuild() for rank in self.ranks]


async def publish_all(
    trainers: TrainerActors, task: PublishTask, tickets: Sequence[int], timeout_s: float
) -> Told:
    """Have `trainers` publish. See `HolderNode`. Errors are those that the driver would get."""
    calls = {
        f"trainer {rank}": answer(f"trainer {rank}", method_of(actor, "sync_publish", how)(task, ticket))
        for (rank, (actor, how)), ticket in zip(trainers.items(), tickets, strict=True)
    }
    outcome = await gather_named(calls, "publish", timeout_s)
    ranks = dict(zip(calls, trainers, strict=True))
    errors = {ranks[name]: SentError.of(error) for name, error in outcome.failures.items()}
    return {ranks[name]: report for name, report in outcome.answers.items()}, errors


def publish_relays(
    trainers: Sequence[RemoteTrainer], nodes: Sequence[str], holders: Sequence[RemoteHolder]
) -> list[PublishRelay]:
    """Return the relays of trainers, with hosts and holders. None if there are few hosts."""
    return [
        PublishRelay(holders[ranks[0]], {rank: trainers[rank] for rank in ranks})
        for ranks in relayed_ranks(nodes)
    ]


def relayed_ranks(nodes: Sequence[str]) -> list[list[int]]:
    """Group the ranks that are asked through relays by host. `nodes` has the host of each rank.

    There are no groups where at most `MAX_DIRECT_HOSTS` hosts have some.
    """
    by_host: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return [*by_host.values()] if len(by_host) > MAX_DIRECT_HOSTS else []
