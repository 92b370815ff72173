"""Links and stores over TLS, and strangers at their ports."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from msgspec.structs import replace

from tests.cable import Cable
from tests.certificates import expired_files, files_and_late_files, run_files
from tests.patience import patient
from weightsync.config import TlsFiles
from weightsync.errors import ConfigError, StateError, TransportError, WireError
from weightsync.node.link import Link, Links
from weightsync.node.messages import NodeOffer
from weightsync.node.node import Node
from weightsync.protocol import listener
from weightsync.protocol.proof import proof_of
from weightsync.protocol.stream import Stream, framed
from weightsync.transports.store import NetworkStore, StoreServer

WAIT_S = patient(10)
WORDS = b"the weights of version 3"
LARGE = bytes(range(256)) * (1 << 14)


class Echoes(Protocol):
    async def echo(self, data: bytes) -> bytes: ...


class Echo:
    """A process that the driver calls."""

    async def echo(self, data: bytes) -> bytes:
        return data


@dataclass(frozen=True)
class Files:
    """Files of one run, one of whose hosts has an expired certificate, and of another run."""

    own: TlsFiles
    late: TlsFiles
    other: TlsFiles


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(*files_and_late_files(tmp_path / "run"), run_files(tmp_path / "other"))


@asynccontextmanager
async def served(tls: TlsFiles | None) -> AsyncIterator[tuple[Link, NodeOffer]]:
    links, link = Links("127.0.0.1", None, tls), Link("engine e0", Echoes)
    try:
        yield link, links.offer(link)
    finally:
        await links.close()


async def serve(offer: NodeOffer) -> None:
    await asyncio.wait_for(Node(offer, Echo(), Echoes).serve(0.5, 0.5), WAIT_S)


async def echoes(link: Link, data: bytes = b"x") -> None:
    assert await asyncio.wait_for(link.call("echo", data), WAIT_S) == data


def test_calls_are_encrypted_and_come_whole(files: Files) -> None:
    async def test() -> None:
        async with served(files.own) as (link, offer), Cable(offer.endpoint) as cable:
            serving = asyncio.ensure_future(serve(replace(offer, endpoint=cable.endpoint)))
            await asyncio.gather(*(echoes(link, WORDS + bytes([i])) for i in range(20)))
            await asyncio.gather(*(echoes(link, LARGE) for _ in range(4)))
            assert len(cable.recorded) > 4 * len(LARGE)
            assert WORDS not in cable.recorded
            assert LARGE[:64] not in cable.recorded
            await cable.cut()
            while not cable.has_dials(2):
                await asyncio.sleep(0.01)
            await echoes(link, WORDS)
            link.end(StateError("the end"))
            await serving

    asyncio.run(test())


def test_a_driver_that_sends_slowly_is_waited_for(files: Files) -> None:
    """Half a record is no lost connection."""

    async def test() -> None:
        async with served(files.own) as (link, offer), Cable(offer.endpoint) as cable:
            serving = asyncio.ensure_future(serve(replace(offer, endpoint=cable.endpoint)))
            await echoes(link)
            for _ in range(3):
                cable.hold()
                call = asyncio.ensure_future(echoes(link, LARGE))
                await asyncio.sleep(0.05)
                cable.let_go()
                await call
            assert not cable.has_dials(2)
            link.end(StateError("the end"))
            await serving

    asyncio.run(test())


Attack = Callable[[str, str, Files], None]


def send(endpoint: str, data: bytes) -> None:
    """Send `data`, and wait until the other end hangs up."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as stranger, suppress(ConnectionError):
        stranger.sendall(data)
        while stranger.recv(1 << 16):
            pass


def shake(endpoint: str, files: TlsFiles | None) -> None:
    """Dial with TLS as a process that checks nothing, and wait until the other end hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if files:
        context.load_cert_chain(files.certificate, files.key)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    dialled = socket.create_connection((host, int(port)), WAIT_S)
    with dialled, suppress(OSError), context.wrap_socket(dialled) as stranger:
        while stranger.recv(1 << 16):
            pass


def guess(endpoint: str, files: Files) -> None:
    with (  # the listener may hang up before it reads the proof
        pytest.raises(OSError, match=r"hung up|reset|EOF"),
        closing(Stream(endpoint, "guess", 64, WAIT_S, files.own)) as stranger,
    ):
        stranger.receive(WAIT_S)


STRANGERS: Mapping[str, tuple[Attack, str]] = {
    "a wrong token": (lambda at, _, files: guess(at, files), "it proves no secret of this run"),
    "no certificate": (lambda at, _, files: shake(at, None), "it has no certificate"),
    "another CA": (lambda at, _, files: shake(at, files.other), "its certificate is of another CA"),
    "an expired certificate": (lambda at, _, files: shake(at, files.late), "its certificate has expired"),
    "plain text": (lambda at, secret, _: send(at, framed(proof_of(secret))), "it does not speak TLS 1.3"),
    "HTTP": (lambda at, *_: send(at, b"GET / HTTP/1.1\r\n\r\n"), "it does not speak TLS 1.3"),
    "silence": (lambda at, *_: send(at, b""), "handshake"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_named_and_nobody_is_slowed(
    name: str, files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.3)
    attack, why = STRANGERS[name]

    async def test() -> None:
        async with served(files.own) as (link, offer):
            serving = asyncio.ensure_future(serve(offer))
            await echoes(link)
            attacks = [asyncio.to_thread(attack, offer.endpoint, offer.secret, files) for _ in range(8)]
            attacking = asyncio.gather(*attacks)
            began = time.monotonic()
            for _ in range(20):
                await echoes(link)
            assert time.monotonic() - began < patient(2)
            await asyncio.wait_for(attacking, WAIT_S)
            await echoes(link)
            link.end(StateError("the end"))
            await serving

    with caplog.at_level(logging.WARNING, "weightsync"):
        asyncio.run(test())
    said = [each.getMessage() for each in caplog.records if "is refused" in each.getMessage()]
    assert len(said) == 1, "once a minute"
    assert "a process at 127.0.0.1:" in said[0]
    assert why in said[0]


def test_a_recorded_connection_is_of_no_use(files: Files) -> None:
    async def test() -> None:
        async with served(files.own) as (link, offer), Cable(offer.endpoint) as cable:
            serving = asyncio.ensure_future(serve(replace(offer, endpoint=cable.endpoint)))
            await echoes(link)
            await asyncio.to_thread(send, offer.endpoint, bytes(cable.recorded))
            await echoes(link)
            assert not cable.has_dials(2), "the process has kept its connection"
            link.end(StateError("the end"))
            await serving

    asyncio.run(test())


def test_tls_at_a_plain_port_is_named_at_both_ends(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served(None) as (link, offer):
            with pytest.raises(TransportError, match=r"does not answer at .*hung up on TLS.*sync.tls"):
                await serve(replace(offer, tls=files.own))
            serving = asyncio.ensure_future(serve(offer))
            await echoes(link)
            link.end(StateError("the end"))
            await serving

    asyncio.run(test())
    assert "is refused: it speaks TLS: set sync.tls here" in caplog.text


def test_a_process_refuses_a_driver_of_another_ca(files: Files) -> None:
    async def test() -> None:
        async with served(files.other) as (_, offer):
            with pytest.raises(WireError, match=r"tcp://127.* is refused: its certificate is of another CA"):
                await serve(replace(offer, tls=files.own))

    asyncio.run(test())


def test_a_process_names_its_own_file_that_is_of_no_use(files: Files, tmp_path: Path) -> None:
    async def test() -> None:
        async with served(files.own) as (_, offer):
            with pytest.raises(ConfigError, match=r"sync.tls.certificate.*late.*expired on \d{4}-\d\d-\d\d"):
                await serve(replace(offer, tls=files.late))
            with pytest.raises(ConfigError, match=r"sync.tls.ca.*No such file.*each host needs the file"):
                await serve(replace(offer, tls=TlsFiles.within(str(tmp_path / "none"))))

    asyncio.run(test())


def test_a_driver_names_its_own_file_before_it_listens(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=r"sync.tls.ca.*expired on"):
            Links("127.0.0.1", None, expired_files(tmp_path))

    asyncio.run(test())


@pytest.fixture
def store(files: Files) -> Iterator[StoreServer]:
    with closing(StoreServer("127.0.0.1", None, files.own)) as server:
        yield server


def test_ranks_meet_over_tls(store: StoreServer, files: Files) -> None:
    with closing(NetworkStore(store.address, WAIT_S, files.own)) as rank:
        rank.set("own", LARGE[:100_000])
        assert rank.get("own") == LARGE[:100_000]


@pytest.mark.parametrize("which", ["none", "other", "late"])
def test_a_rank_without_the_files_of_the_run_meets_nobody(
    store: StoreServer, files: Files, which: str
) -> None:
    tls: Any = None if which == "none" else getattr(files, which)
    rank = NetworkStore(store.address, patient(2), tls)
    with closing(rank), pytest.raises((RuntimeError, ConfigError), match=r"broke|another CA|expired"):
        rank.set("own", b"1")
