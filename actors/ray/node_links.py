"""The links to actors, whose nodes Ray starts, and to other processes, which dial in by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import ray

from weightsync.actors.ray.placement import Placement
from weightsync.actors.servers.door import Door
from weightsync.actors.servers.handle import JoinedServer, ProcessHandle
from weightsync.actors.servers.rank import JoinedRank
from weightsync.config import Ports, SyncConfig, TlsFiles
from weightsync.errors import ConfigError, PeerError, PeerLostError, WeightSyncError
from weightsync.node.link import Link, Links
from weightsync.node.messages import NodeOffer

logger = logging.getLogger("weightsync.actors")


class Served(Protocol):
    """An actor that can host a node. `protocol`: the methods that its node answers."""

    name: str
    protocol: type
    node: Link | None

    @property
    def key(self) -> Hashable: ...
    async def serve_node(self, offer: NodeOffer) -> None: ...


class NodeLinks:
    """One link for each actor, by the actor's key; others have a link already. Used on one event loop."""

    def __init__(self, ports: Ports | None, tls: TlsFiles | None = None, door: Door | None = None) -> None:
        """See `Links`. `door`: where processes that Ray did not start join, if any may."""
        self._ports, self._tls, self._door = ports, tls, door
        self._listening: Links | None = None
        self._joining: Links | None = None
        self._links: dict[Hashable, Link] = {}
        self._starting: set[asyncio.Task[None]] = set()

    def open(self, peer: Served) -> None:
        """Give `peer` the link to its actor, whose node Ray starts if it has none.

        Errors name the actor by the peer's name from now on. Raises ConfigError or TransportError as `Links`.
        """
        if isinstance(handle := getattr(peer, "handle", None), ProcessHandle):
            peer.node = handle.link
            return
        if peer.key not in self._links:
            link = self._links[peer.key] = Link(peer.name, peer.protocol)
            starting = asyncio.ensure_future(self._start(peer, link, self._offer(link)))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
        peer.node = self._links[peer.key]
        peer.node.name = peer.name

    def start_holder(
        self, name: str, placement: Placement, transport: str, config: SyncConfig
    ) -> ProcessHandle | None:
        """Start a holder beside the process there, see `Starts`. Raises as `open`."""
        joined = self._door and self._door.starter(placement)
        return joined.start_holder(name, placement, transport, config.ports, self._offer) if joined else None

    def _offer(self, link: Link) -> NodeOffer:
        if self._listening is None:
            self._listening = Links(ray.util.get_node_ip_address(), self._ports, self._tls)
        return self._listening.offer(link)

    def expect(self, engines: Mapping[str, object], trainers: Sequence[object]) -> None:
        """Let the servers among `engines`, and the ranks among `trainers`, join. Raises as `open`."""
        host, door = ray.util.get_node_ip_address(), self._door
        servers = {name: each for name, each in engines.items() if isinstance(each, JoinedServer)}
        ranks = [each for each in trainers if isinstance(each, JoinedRank)]
        assert door
        if (servers or ranks) and not self._joining:
            assert door.port
            try:
                self._joining = Links(host, (door.port, door.port), self._tls, door)
            except ConfigError as error:
                if error.field != "sync.ports":
                    raise
                remedy = f"it is in use on {host}: end an earlier driver there, or give another port"
                raise ConfigError("sync.join_port", door.port, remedy) from None
        for name, server in servers.items():
            door.expect(name, server, host)
        door.expect_ranks(ranks)

    async def _start(self, peer: Served, link: Link, offer: NodeOffer) -> None:
        try:
            await peer.serve_node(offer)
        except WeightSyncError as error:
            if self._links.get(peer.key) is link:
                del self._links[peer.key]  # the next `open` tries again
            is_own = isinstance(error, PeerLostError | PeerError)
            link.end(error if is_own else PeerError(peer.name, f"its node does not start: {error}"))

    def end(self, key: Hashable, error: WeightSyncError) -> None:
        """Have calls to the actor of this `key` raise `error`. `open` gives it a new link."""
        if link := self._links.pop(key, None):
            link.end(error)

    async def close(self) -> None:
        """End all nodes."""
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        self._links.clear()
        for listening in (self._listening, self._joining):
            if listening:
                await listening.close()
        self._listening = self._joining = None
