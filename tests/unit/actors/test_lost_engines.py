"""Engines that stopped answering."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patient
from weightsync import SyncConfig
from weightsync.actors import lost_engines
from weightsync.actors.lost_engines import LostEngines
from weightsync.actors.ray.remote import remote_engine
from weightsync.actors.servers.handle import JoinedServer
from weightsync.driver.events import EngineBack, Events
from weightsync.driver.fleet import EngineMember, Fleet
from weightsync.errors import PeerLostError


async def dialled() -> None: ...


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_server_that_joins_again_before_it_is_known_to_be_lost_comes_back(
    is_lost_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_engines, "_AGAIN_S", 0.01)

    async def scenario() -> None:
        server: Any = JoinedServer("http://10.0.0.7:8000")
        server.expect("engine e0", 60)
        peer = remote_engine("engine e0", server, None, None)
        peer.node = server.link
        fleet, events, back = Fleet([], {"e0": EngineMember(peer, ())}, []), Events(), asyncio.Event()
        group = SimpleNamespace(lost=lambda name, error: dead.append(name))
        dead = list[str]()
        events.subscribe(EngineBack, lambda _: dead and back.set())  # the healer does nothing before
        controller: Any = SimpleNamespace(events=events, engine_group=group)
        other: Any = None
        lost = LostEngines(SyncConfig(), fleet, controller, lambda: {"e0": server}, other, {}, other)

        error = PeerLostError("engine e0", "its process joins again")
        server.link.end(error)
        server.expect("engine e0", 60)
        monkeypatch.setattr(server.link, "dialled", dialled)
        if is_lost_first:
            lost.add("e0", server, error)
        lost.joined(server)
        if not is_lost_first:
            for _ in range(10):
                await asyncio.sleep(0)
            lost.add("e0", server, error)
        await asyncio.wait_for(back.wait(), patient(5))
        lost.close()

    asyncio.run(scenario())
