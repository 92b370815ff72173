"""Servers that join are known by the names under which they were registered last."""

from __future__ import annotations

import asyncio

import pytest

from weightsync.actors.servers.door import Door, with_servers
from weightsync.actors.servers.handle import JoinedServer
from weightsync.config import SyncConfig
from weightsync.errors import PeerLostError
from weightsync.node.link import Link
from weightsync.node.messages import Join


def test_a_server_that_is_registered_under_another_name_is_blamed_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a secret of the fleet")

    async def run() -> None:
        config = SyncConfig(join_port=29500)
        door = Door(config, lambda _: None, lambda _: False)
        for name in ("e0", "e1"):
            server = with_servers({name: "http://127.0.0.1:8000"}, config, door)[name]
            assert isinstance(server, JoinedServer)
            door.expect(name, server, "127.0.0.1")
            assert isinstance(door.link(Join("http://127.0.0.1:8000", "a process")), Link)
        server.kill()
        with pytest.raises(PeerLostError, match="engine e1 is gone"):
            await server.sync_ping.remote()

    asyncio.run(run())
