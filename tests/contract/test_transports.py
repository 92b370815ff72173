"""One suite for every transport: same bytes everywhere, deadlines kept, the late and the lost survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from weightsync.errors import ConfigError, TransportError
from weightsync.transports import TRANSPORTS, Transport, transport_class


@pytest.fixture(params=sorted(TRANSPORTS))
def ring(request: pytest.FixtureRequest):
    """`ring(num_ranks, work)` runs ``work(transport, rank)`` on every rank and returns the futures."""
    made: list[Transport] = []
    pool = ThreadPoolExecutor(8)

    def run(
        num_ranks: int, work: Callable[[Transport, int], object], timeout_s: float = 10
    ) -> list[Future[object]]:
        transports = [transport_class(request.param)() for _ in range(num_ranks)]
        made.extend(transports)
        address = transports[0].offer("127.0.0.1")

        def one(rank: int) -> object:
            transports[rank].open(address, rank, num_ranks, timeout_s)
            return work(transports[rank], rank)

        return [pool.submit(one, rank) for rank in range(num_ranks)]

    yield run
    for transport in made:
        transport.close()
        transport.close()
    pool.shutdown()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_rank_has_the_roots_bytes(ring, num_ranks: int) -> None:
    sizes = [1, 255, 4096, 1_000_003]

    def work(transport: Transport, rank: int) -> list[bool]:
        right = []
        for root in range(num_ranks):
            for nbytes in sizes:
                wanted = torch.arange(nbytes).remainder(251).to(torch.uint8) + root
                data = wanted.clone() if rank == root else torch.full((nbytes,), 255, dtype=torch.uint8)
                transport.broadcast(data, root)
                right.append(torch.equal(data, wanted))
        transport.barrier()
        return right

    for future in ring(num_ranks, work):
        assert future.result(30) == [True] * (num_ranks * len(sizes))


def test_a_broadcast_out_of_and_into_a_part_of_a_buffer_leaves_the_rest(ring) -> None:
    def work(transport: Transport, rank: int) -> list[int]:
        buffer = torch.full((10,), rank, dtype=torch.uint8)
        transport.broadcast(buffer[3:6], 1)
        return buffer.tolist()

    first, second = (future.result(30) for future in ring(2, work))
    assert first == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert second == [1] * 10


def test_a_rank_that_never_comes_ends_the_others_wait_at_the_deadline(ring) -> None:
    def work(transport: Transport, rank: int) -> float:
        if rank == 2:
            return 0.0
        started = time.monotonic()
        with pytest.raises(TransportError):
            transport.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), 2)
        return time.monotonic() - started

    waits = [future.result(30) for future in ring(3, work, timeout_s=1)]
    assert 0.5 < waits[0] < 10
    assert 0.5 < waits[1] < 10


def test_a_rank_that_leaves_is_noticed_before_the_deadline(ring) -> None:
    left = threading.Event()

    def work(transport: Transport, rank: int) -> float:
        transport.barrier()
        if rank == 1:
            transport.close()
            left.set()
            return 0.0
        assert left.wait(10)
        started = time.monotonic()
        with pytest.raises(TransportError):
            transport.broadcast(torch.zeros(1 << 20, dtype=torch.uint8), 1)
        return time.monotonic() - started

    assert ring(2, work, timeout_s=30)[0].result(40) < 20


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_a_rank_that_never_joins_fails_the_opening(name: str) -> None:
    transport = transport_class(name)()
    address = transport.offer("127.0.0.1")
    with pytest.raises(TransportError, match="rank 0 of 2"):
        transport.open(address, 0, 2, 0.5)
    transport.close()


def test_an_unknown_transport_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gloo'"):
        transport_class("glo")
