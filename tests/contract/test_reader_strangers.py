"""Strangers at a ZeroMQ server's door: what they send, and that they sit there.

They are real connections to a process of its own, which may have 1,024 descriptors, the usual limit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from tests.contract.reader_processes import Peer, pattern
from tests.patience import patient
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.readers import Read, open_reader, serve

NBYTES = 1000
NUM_FRAMES = 200_000
NUM_DESCRIPTORS = 1024
MAX_GROWTH_NBYTES = 8 << 20
WAIT_S = patient(10)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Sees as many strangers as this process may have, which is more than the server may."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    peer = Peer(1, NBYTES, ["zeromq"])
    peer.offer("zeromq")
    resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
    yield peer
    peer.end()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def greeting(mechanism: bytes) -> bytes:
    """How a connection begins, see ZMTP 3.1."""
    signature, version = b"\xff" + bytes(8) + b"\x7f", b"\x03\x01"
    return signature + version + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes = b"") -> bytes:
    data = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(data)]) + data


READY = command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER")
FRAMES = b"\x01\x01x" * NUM_FRAMES
HUGE_HELLO = b"\x06" + struct.pack(">Q", 1 << 30) + b"\x05HELLO" + b"x" * (64 << 20)


def by_hand(*data: bytes) -> Callable[[Offer], None]:
    """A stranger that does not wait for what the server says."""

    def send(offer: Offer) -> None:
        with address_of(offer) as stranger, contextlib.suppress(ConnectionError):
            for each in data:
                stranger.sendall(each)
            with contextlib.suppress(OSError):  # it is turned away already
                stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass

    return send


def by_zeromq(**options: str) -> Callable[[Offer], None]:
    """A stranger that uses the library, until it is told anything, or is turned away."""

    def send(offer: Offer) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.SNDTIMEO, 100)
            for name, value in options.items():
                stranger.setsockopt_string(getattr(zmq, name), value)
            refused = (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
            )
            with stranger.get_monitor_socket(refused) as monitor:
                stranger.connect(offer.endpoint)
                with contextlib.suppress(zmq.Again):  # it was turned away in the midst of the message
                    stranger.send_multipart([b"x"] * NUM_FRAMES)
                poller = zmq.Poller()
                poller.register(monitor, zmq.POLLIN)
                poller.register(stranger, zmq.POLLIN)
                assert poller.poll(WAIT_S * 1e3)
                stranger.disable_monitor()

    return send


def address_of(offer: Offer) -> socket.socket:
    host, _, port = offer.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(by_zeromq(), id="no secret"),
        pytest.param(by_zeromq(PLAIN_USERNAME="peer", PLAIN_PASSWORD="wrong"), id="wrong secret"),
        pytest.param(by_hand(greeting(b"NULL"), READY, FRAMES), id="as without a handshake"),
        pytest.param(by_hand(greeting(b"PLAIN"), FRAMES), id="before the handshake"),
        pytest.param(by_hand(greeting(b"PLAIN"), HUGE_HELLO), id="a long handshake"),
        pytest.param(by_hand(os.urandom(1 << 20)), id="random bytes"),
    ],
)
def test_what_a_stranger_sends_is_not_kept(peer: Peer, attack: Callable[[Offer], None]) -> None:
    reads_well(peer)
    Path(f"/proc/{peer.pid}/clear_refs").write_text("5")  # the peak begins at what it has now
    before = memory(peer, "VmRSS")
    for _ in range(3):
        attack(peer.offer("zeromq"))
    reads_well(peer)
    assert memory(peer, "VmHWM") - before < MAX_GROWTH_NBYTES


@pytest.mark.parametrize(
    ("first", "num_strangers"),
    [
        pytest.param(b"", 500, id="silent-500"),
        pytest.param(greeting(b"PLAIN"), 500, id="greets-500"),
        pytest.param(greeting(b"NULL") + READY, 500, id="no secret-500"),
        # The server waits as long for these as for those that greet: seconds.
        pytest.param(b"", 1100, id="silent-1100", marks=pytest.mark.faults),
        pytest.param(greeting(b"PLAIN"), 1100, id="greets-1100"),
        pytest.param(greeting(b"NULL") + READY, 1100, id="no secret-1100"),
    ],
)
def test_strangers_that_sit_there_do_not_keep_a_reader_out(
    peer: Peer, first: bytes, num_strangers: int
) -> None:
    """Each takes a descriptor. When there is none left, a reader gets in as soon as they are turned out."""
    with contextlib.ExitStack() as strangers:
        for _ in range(num_strangers):
            strangers.enter_context(address_of(peer.offer("zeromq"))).sendall(first)
        reads_well(peer)
    reads_well(peer)


def test_the_secret_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    source, target = SharedBuffer.create(NBYTES), SharedBuffer.create(NBYTES)
    server = serve(source, "h1", "127.0.0.1", "zeromq")
    reader = open_reader([target], {"h1": server.offer}, may_map=False)
    assert reader.read([Read("h1", 0, 0, 0, NBYTES)], WAIT_S)
    for each in (reader, server, source, target):
        each.close()
    assert server.offer.secret not in caplog.text


def reads_well(peer: Peer) -> None:
    target = SharedBuffer.create(NBYTES)
    reader = open_reader([target], {"peer 1": peer.offer("zeromq")}, may_map=False)
    try:
        assert reader.read([Read("peer 1", 0, 0, 0, NBYTES)], WAIT_S) == {"peer 1": NBYTES}
        assert torch.equal(target.tensor, pattern(NBYTES, 1))
    finally:
        reader.close()
        target.close()


def memory(peer: Peer, key: str) -> int:
    """Bytes, of the server's process."""
    lines = Path(f"/proc/{peer.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
