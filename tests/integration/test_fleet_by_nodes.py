"""A fleet whose driver calls every peer by a link, as where each peer has a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

from tests.fleets.loop import CONFIG, Loop
from tests.patience import patient
from weightsync.errors import PeerError
from weightsync.node.link import Link, Links
from weightsync.node.node import serve
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer


async def through_nodes(loop: Loop, links: Links) -> list[Link]:
    """Have every peer of the fleet answer on a thread of its own, and the driver call it by a link."""
    made: list[Link] = []
    welcomed: list[Future[None]] = []

    def linked(name: str, peer: object, protocol: type) -> Any:
        link = Link(name, protocol)
        welcomed.append(serve(links.offer(link), peer, protocol).welcomed)
        made.append(link)
        return link

    fleet = loop.fleet
    fleet.trainers[:] = [
        (linked(f"trainer {rank}", peer, TrainerPeer), holder)
        for rank, (peer, holder) in enumerate(fleet.trainers)
    ]
    fleet.holders[:] = [linked(f"holder {i}", peer, HolderPeer) for i, peer in enumerate(fleet.holders)]
    for name, member in fleet.engines.items():
        member.peer = linked(f"engine {name}", member.peer, EnginePeer)
    dialled: list[Awaitable[None]] = [asyncio.wrap_future(each) for each in welcomed]
    await asyncio.wait_for(asyncio.gather(*dialled), patient(10))
    return made


def test_a_fleet_behind_nodes_connects_and_updates() -> None:
    async def work() -> None:
        links = Links("127.0.0.1")
        made = await through_nodes(loop, links)
        await loop.controller.connect()
        for version in (1, 2):
            loop.train()
            await loop.controller.update(version)
            assert all(loop.holds_the_models_weights(name) for name in loop.engines)
        assert {await each.peer.serving() for each in loop.fleet.engines.values()} == {2}
        assert all(each.is_dialled for each in made), "no connection was lost"
        for each in made:
            each.end(PeerError(each.name, "the test is over"))
        await links.close()

    loop = Loop(CONFIG)
    try:
        asyncio.run(work())
    finally:
        loop.close()
