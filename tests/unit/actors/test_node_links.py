"""Links to actors whose nodes Ray starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightsync.actors.ray.node_links import NodeLinks
from weightsync.errors import PeerError
from weightsync.node.link import Link
from weightsync.node.messages import NodeOffer
from weightsync.protocol.peers import EnginePeer


class Unreached:
    """An actor that Ray does not reach at first."""

    name, key, protocol = "engine e0", "e0", EnginePeer
    node: Link | None = None
    num_asked = 0

    async def serve_node(self, offer: NodeOffer) -> None:
        self.num_asked += 1
        raise PeerError(self.name, "it cannot be reached")


def test_an_actor_whose_node_did_not_start_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")

    async def test() -> None:
        links, actor = NodeLinks(None), Unreached()
        peer: Any = actor
        for number in (1, 2):
            links.open(peer)
            with pytest.raises(PeerError, match="cannot be reached"):
                await peer.node.call("serving")
            assert actor.num_asked == number
        await links.close()

    asyncio.run(test())
