"""Servers that join, and errors that name them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.fleets.actors import until
from tests.patience import patient
from weightsync.actors.servers.door import Door, with_servers
from weightsync.actors.servers.handle import JoinedServer
from weightsync.config import SyncConfig
from weightsync.errors import DeadlineError, PeerLostError
from weightsync.node.link import Link
from weightsync.node.messages import Join

LATE = DeadlineError("start", ["engine e0"], 20)


@pytest.fixture
def door() -> Door:
    door = Door(SyncConfig(join_port=29500), lambda server: None, lambda server: False)
    door.expect("e0", door.server("http://127.0.0.1:8000"), "10.0.0.1")
    return door


def test_a_server_that_never_dialled_is_named_with_the_drivers_address(door: Door) -> None:
    error = door.explained(LATE, door.server("http://127.0.0.1:8000"))
    assert str(error) == (
        "start: no answer within 20 s from engine e0 (http://127.0.0.1:8000 has not joined at 10.0.0.1:29500)"
    )
    assert isinstance(error, DeadlineError)


def test_the_url_of_a_server_that_was_refused_is_named(door: Door) -> None:
    assert door.link(Join("http://10.0.0.7:8001", "a process")) == (
        "http://10.0.0.7:8001 is not registered; registered: http://127.0.0.1:8000"
    )
    error = door.explained(LATE, door.server("http://127.0.0.1:8000"))
    assert str(error).endswith("at 10.0.0.1:29500; http://10.0.0.7:8001 was refused)")


def test_a_url_may_end_with_a_slash(door: Door) -> None:
    assert isinstance(door.link(Join("http://10.0.0.1:8000/", "a process")), Link)


def test_a_server_whose_host_gets_another_address_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pod does that Kubernetes starts again: the name in the URL stays."""
    door, addresses = Door(SyncConfig(join_port=29500), lambda _: None, lambda _: False), ["10.0.0.7"]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in addresses]
    )
    server = door.server("http://engine-0.engines:8000")

    async def run() -> None:
        door.expect("e0", server, "10.0.0.1")
        assert isinstance(door.link(Join("http://10.0.0.7:8000", "a process")), Link)
        addresses[:] = ["10.0.0.8"]
        there, before = (
            Join("http://10.0.0.8:8000", "the next process"),
            Join("http://10.0.0.7:8000", "another"),
        )
        assert "is not registered" in str(door.link(there))
        assert await asyncio.to_thread(until, lambda: door.link(there) is server.link, patient(10))
        assert "is not registered" in str(door.link(before))

    asyncio.run(run())


def test_other_errors_and_other_engines_stay(door: Door) -> None:
    server, lost = door.server("http://127.0.0.1:8000"), PeerLostError("engine e0", "it ended")
    assert door.explained(lost, server) is lost
    assert door.explained(LATE, object()) is LATE
    server.link.process = "a process"
    assert door.explained(LATE, server) is LATE


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
