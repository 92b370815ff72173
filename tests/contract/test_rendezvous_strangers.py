"""Strangers at the rendezvous of a communicator, and values in it that no rank wrote."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.readers.zeromq_handshake import show_secret
from weightsync.transports import Broadcast, Transport, transport_class
from weightsync.transports.store import NetworkStore, StoreServer

WAIT_S = patient(10)
NUM_IDLE = 300


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1")
    yield server
    server.close()


def connected(address: str, host: str = "") -> socket.socket:
    """A stranger knows where the store is, and not its secret."""
    where, _, port = address.rpartition("@")[2].rpartition(":")
    return socket.create_connection((host or where, int(port)), WAIT_S)


def random_bytes(address: str, strangers: contextlib.ExitStack) -> None:
    for size in (1, 10, 64, 1000, 1 << 20):
        stranger = strangers.enter_context(connected(address))
        with contextlib.suppress(OSError):  # it is turned away
            stranger.sendall(os.urandom(size))


def what_torch_says(address: str, strangers: contextlib.ExitStack) -> None:
    """The first words of torch's own client, with random queries after them."""
    for query in range(12):
        stranger = strangers.enter_context(connected(address))
        with contextlib.suppress(OSError):
            stranger.sendall(b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + bytes([query]) + os.urandom(4096))


def half_open(address: str, strangers: contextlib.ExitStack) -> None:
    for _ in range(20):
        stranger = strangers.enter_context(connected(address))
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        stranger.shutdown(socket.SHUT_WR)


def idle(address: str, strangers: contextlib.ExitStack) -> None:
    for _ in range(NUM_IDLE):
        strangers.enter_context(connected(address))


def wrong_secret(address: str, strangers: contextlib.ExitStack) -> None:
    context = strangers.enter_context(zmq.Context())
    for secret in ("", "wrong"):
        stranger = strangers.enter_context(context.socket(zmq.DEALER))
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SNDTIMEO, 100)
        if secret:
            show_secret(stranger, secret)
        stranger.connect(f"tcp://{address.rpartition('@')[2]}")
        with contextlib.suppress(zmq.Again):
            stranger.send_multipart([b"x"] * 10_000)


def wrong_values(address: str, strangers: contextlib.ExitStack) -> None:
    """From somebody who has the secret."""
    store = NetworkStore(address, WAIT_S)
    strangers.callback(store.close)
    for key in ("call", "left/0", "left/1", "here/0", "here/1"):
        store.set(key, os.urandom(20))
    store.set("news", "")


@pytest.mark.parametrize(
    "attack", [random_bytes, what_torch_says, half_open, idle, wrong_secret, wrong_values]
)
def test_a_run_connects_moves_and_connects_again(
    attack: Callable[[str, contextlib.ExitStack], None],
) -> None:
    with contextlib.ExitStack() as strangers, ThreadPoolExecutor(2) as threads:
        for version in (1, 2):
            transports = [transport_class("gloo")() for _ in range(2)]
            address = transports[0].offer("127.0.0.1")
            attack(address, strangers)
            opening = [
                threads.submit(each.open, address, rank, 2, WAIT_S) for rank, each in enumerate(transports)
            ]
            for each in opening:
                each.result(3 * WAIT_S)
            attack(address, strangers)
            moving = [threads.submit(move, each, rank, version) for rank, each in enumerate(transports)]
            assert [each.result(3 * WAIT_S) for each in moving] == [[version] * 10] * 2
            tell_each_other(transports, threads)


def move(transport: Transport, rank: int, value: int) -> list[int]:
    data = torch.full((10,), value if rank == 0 else 0, dtype=torch.uint8)
    transport.start([Broadcast(data, 0)]).wait()
    return data.tolist()


def tell_each_other(transports: list[Transport], threads: ThreadPoolExecutor) -> None:
    """Both listen still: rank 1 is told that rank 0 left, long before its deadline."""
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    waiting = threads.submit(lambda: transports[1].start([Broadcast(data, 0)]).wait())
    transports[0].abort("the end")
    with pytest.raises(TransportError, match="rank 0 of 2 left before operation 2: the end"):
        waiting.result(3 * WAIT_S)
    for each in reversed(transports):
        each.close()


def test_it_listens_on_its_own_address_alone(server: StoreServer) -> None:
    connected(server.address).close()
    with pytest.raises(ConnectionRefusedError):
        connected(server.address, "127.0.0.2")


def test_an_address_that_is_not_ours_cannot_be_served_on() -> None:
    with pytest.raises(TransportError, match=r"no rendezvous can be served on 192\.0\.2\.1"):
        StoreServer("192.0.2.1")


def test_the_secret_is_in_no_error() -> None:
    server = StoreServer("127.0.0.1")
    secret, _, place = server.address.rpartition("@")
    transport = transport_class("gloo")()
    server.close()
    with pytest.raises(TransportError, match=place) as told:
        transport.open(server.address, 1, 2, 1.0)
    assert secret not in str(told.value)
    transport.close()


def test_it_keeps_what_stores_of_torch_keep(server: StoreServer) -> None:
    store, other = (NetworkStore(server.address, WAIT_S) for _ in range(2))
    assert not store.check(["a"])
    store.set("a", b"\xff1")
    assert other.get("a") == b"\xff1"
    assert [store.add("n", 2), other.add("n", -1), store.add("n", 0)] == [2, 1, 1]
    assert other.get("n") == b"1"
    assert store.compare_set("c", "", "1") == b"1"
    assert other.compare_set("c", "", "2") == b"1"
    assert other.compare_set("c", "1", "2") == b"2"
    assert store.compare_set("none", "1", "2") == b"1"
    assert not other.check(["a", "none"])
    with pytest.raises(RuntimeError, match="not a number"):
        store.add("a", 1)
    other.wait(["a", "n"])
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.check(["a"])
    server.close()
    with pytest.raises(RuntimeError, match="broke, or there is none"):
        other.check(["a"])
    other.close()


def test_a_call_that_waits_ends_when_the_store_is_closed(server: StoreServer) -> None:
    store = NetworkStore(server.address, WAIT_S)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.get, "what nobody sets")
        store.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(WAIT_S)


def test_what_nobody_sets_is_named_at_the_deadline(server: StoreServer) -> None:
    store = NetworkStore(server.address, 0.1)
    with pytest.raises(RuntimeError, match=r"what nobody sets: not set within 0\.1 s"):
        store.get("what nobody sets")
    store.close()
