"""Strangers that take all file descriptors of a process that listens: it waits, and says so once."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias

import pytest

from tests.forked import forking
from tests.patience import patient

NUM_SPARE = 40
NUM_STRANGERS = 150
WATCHED_S = 1.5
"""Pauses are of a second."""


class Resuming(Protocol):
    async def resume(self, version: int) -> None: ...


Served: TypeAlias = tuple[str, Callable[[], None]]


def driver() -> Served:
    """Listen as the driver, or as a holder that calls the holders of its host."""
    from weightsync.actors.ray.loop import LoopThread
    from weightsync.node.link import Link, Links
    from weightsync.node.messages import NodeOffer
    from weightsync.node.node import serve as serve_node

    loop, link, asked = LoopThread(), Link("engine e0", Resuming), list[int]()

    class Process:
        async def resume(self, version: int) -> None:
            asked.append(version)

    async def begin() -> tuple[Links, NodeOffer]:
        links = Links("127.0.0.1")
        return links, links.offer(link)

    async def call() -> None:
        await link.call("resume", 3)

    links, offer = loop.run_concurrently(begin()).result()

    def serve() -> None:
        serve_node(offer, Process(), Resuming)
        loop.run_concurrently(call()).result(patient(20))
        assert asked == [3]
        loop.run_concurrently(links.close()).result()
        loop.close()

    return offer.endpoint, serve


def store() -> Served:
    """Listen as rank 0 of a communicator, where its ranks meet."""
    from weightsync.transports.store import NetworkStore, StoreServer

    server = StoreServer("127.0.0.1")

    def serve() -> None:
        rank = NetworkStore(server.address, patient(20))
        rank.set("key", "value")
        assert rank.get("key") == b"value"
        rank.close()
        server.close()

    return server.address.rpartition("@")[2], serve


def link() -> Served:
    """Listen as the examined host of a pair."""
    from weightsync.recipes.doctor.link_probe import SECRET_NBYTES, LinkServer, measure

    secret = bytes(SECRET_NBYTES)
    server = LinkServer("127.0.0.1", None, secret, patient(20))

    def serve() -> None:
        assert measure(server.endpoint, secret, patient(20)).nbytes
        server.close()

    return server.endpoint, serve


def listen(pipe: Connection, begin: Callable[[], Served]) -> None:
    """Listen with few descriptors, and tell what it logged and used."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    endpoint, serve = begin()
    open_now, hard = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + NUM_SPARE, hard))
    pipe.send(endpoint)
    pipe.recv()
    begun = time.process_time()
    assert not pipe.poll(WATCHED_S)
    pipe.send((told, time.process_time() - begun))
    pipe.recv()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the process that dials is this one, too
    serve()
    pipe.send("served")


@pytest.mark.parametrize(("begin", "num_told"), [(driver, 1), (store, 1), (link, 0)])
def test_a_listener_waits_and_says_so_once(begin: Callable[[], Served], num_told: int) -> None:
    ours, theirs = forking().Pipe()
    process = forking().Process(target=listen, args=(theirs, begin))
    process.start()
    theirs.close()
    with ours:
        assert ours.poll(patient(60))
        host, _, port = ours.recv().removeprefix("tcp://").rpartition(":")
        with ExitStack() as strangers:
            for _ in range(NUM_STRANGERS):
                strangers.enter_context(socket.create_connection((host, int(port)), patient(10)))
            ours.send("they are there")
            assert ours.poll(patient(60))
            told, cpu_s = ours.recv()
        ours.send("they have left")
        assert ours.poll(patient(60))
        assert ours.recv() == "served"
    process.join(patient(60))
    assert process.exitcode == 0
    assert len(told) == num_told, told[:5]
    assert all("has to wait: it has no file descriptors left" in each for each in told)
    assert cpu_s < WATCHED_S / 10
