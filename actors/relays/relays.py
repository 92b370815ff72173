"""Which calls of an update go through a holder of each host."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.actors.ray.control_channels import ControlChannels
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer
from weightsync.actors.relays.move_relay import MoveRelay
from weightsync.actors.relays.publish_relay import PublishRelay
from weightsync.driver.fleet import Fleet

MAX_DIRECT_HOSTS = 8
"""Where trainers are on more hosts than that, a holder of each host asks its trainers, and so with holders.

A Ray call costs the driver 1.4 ms, so 8 hosts of 8 ranks cost it 90 ms, and 125 hosts 1.4 s. A message to a
holder, with the answers of 8 ranks, costs at most 1.8 ms: 0.23 s for 125 hosts. Holders are called over
control channels either way: 0.16 ms each, or 0.5 ms for a message to 8. benchmarks/README.md has the figures.
On few hosts it is not worth what it takes: Ray keeps the calls of one process in order, so trainers that the
driver's process asks itself publish after what that process had submitted to them before.
"""


class Relays:
    """The relays in use, each with a control channel."""

    def __init__(self, channels: ControlChannels, fleet: Fleet) -> None:
        self._channels, self._fleet = channels, fleet
        self._used: Sequence[PublishRelay | MoveRelay] = ()

    def use(self, publishing: Sequence[PublishRelay], moving: Sequence[MoveRelay]) -> None:
        """Have trainers and holders be asked through these, and no longer through others.

        Those of `moving` are asked once the fleet has connected.
        """
        used: list[PublishRelay | MoveRelay] = [*publishing, *moving]
        for gone in {each.key for each in self._used} - {each.key for each in used}:
            self._channels.forget(gone)
        for relay in publishing:
            self._channels.open(relay)
        self._used = used
        self._fleet.relays[:] = publishing
        self._fleet.move_relays[:] = moving


def publish_relays(
    trainers: Sequence[RemoteTrainer], nodes: Sequence[str], holders: Sequence[RemoteHolder]
) -> list[PublishRelay]:
    """Return the relays of trainers, each with its host and its holder. None if the hosts are few."""
    return [
        PublishRelay(holders[ranks[0]], {rank: trainers[rank] for rank in ranks})
        for ranks in relayed_ranks(nodes)
    ]


def move_relays(
    channels: ControlChannels, holders: Sequence[RemoteHolder], nodes: Sequence[str]
) -> list[MoveRelay]:
    """Return the relays of holders, each with its host. None if the hosts are few.

    A holder that is alone on its host has none: a message to it is a message to a relay.
    """
    return [
        MoveRelay(channels, {index: holders[index] for index in indices})
        for indices in relayed_ranks(nodes)
        if len(indices) > 1
    ]


def relayed_ranks(nodes: Sequence[str]) -> list[list[int]]:
    """Group the ranks that are asked through relays by their hosts, of which `nodes` has one for each rank.

    There are no groups where at most `MAX_DIRECT_HOSTS` hosts have some.
    """
    by_host: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return [*by_host.values()] if len(by_host) > MAX_DIRECT_HOSTS else []
