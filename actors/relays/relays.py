"""Which calls of an update go through a holder of each host."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.remote import RemoteHolder, RemoteTrainer
from weightsync.actors.relays.move_relay import MoveRelay
from weightsync.actors.relays.publish_relay import PublishRelay
from weightsync.actors.servers.handle import ProcessHandle
from weightsync.driver.fleet import Fleet
from weightsync.errors import PeerError, WeightSyncError

MAX_DIRECT_HOSTS = 8
"""If trainers are on more hosts, a holder on each host asks the trainers there, and likewise holders.

A Ray call costs the driver 1.4 ms, so 8 hosts of 8 ranks cost it 90 ms, and 125 hosts 1.4 s. A message to a
holder, with the answers of 8 ranks, costs at most 1.8 ms: 0.23 s for 125 hosts. Holders are called by their
nodes either way, each or 8 with one message; docs/decisions/0005-ray-calls-per-phase.md has the figures.
On few hosts relays are not worth the price: Ray keeps the calls of one process in order. So if the driver's
process asks trainers itself, they publish after the calls that this process submitted before.
"""


class Relays:
    """The relays in use, with their links."""

    def __init__(self, links: NodeLinks, fleet: Fleet) -> None:
        self._links, self._fleet = links, fleet
        self._used: Sequence[PublishRelay | MoveRelay] = ()

    def use(self, publishing: Sequence[PublishRelay], moving: Sequence[MoveRelay]) -> None:
        """Ask trainers and holders through these relays from now on.

        Holders are asked through `moving` once the fleet has connected.
        """
        used: list[PublishRelay | MoveRelay] = [*publishing, *moving]
        for gone in {each.key for each in self._used} - {each.key for each in used}:
            self._links.end(gone, PeerError("a relay", "it is not used any more"))
        for relay in publishing:
            self._links.open(relay)
        self._used = used
        self._fleet.relays[:] = publishing
        self._fleet.move_relays[:] = moving

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


def move_relays(links: NodeLinks, holders: Sequence[RemoteHolder], nodes: Sequence[str]) -> list[MoveRelay]:
    """Return the relays of holders, with hosts. None if there are few hosts.

    A holder that is alone on a host has no relay: a relay would take one message, too.
    """
    return [
        MoveRelay(links, {index: holders[index] for index in indices})
        for group in relayed_ranks(nodes)
        if len(indices := [i for i in group if not isinstance(holders[i].handle, ProcessHandle)]) > 1
    ]


def relayed_ranks(nodes: Sequence[str]) -> list[list[int]]:
    """Group the ranks that are asked through relays by their hosts, of which `nodes` has one for each rank.

    There are no groups where at most `MAX_DIRECT_HOSTS` hosts have some.
    """
    by_host: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_host.setdefault(node, []).append(rank)
    return [*by_host.values()] if len(by_host) > MAX_DIRECT_HOSTS else []
