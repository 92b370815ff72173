"""One suite for every transport: same bytes everywhere, deadlines kept, the late and the lost survived.

Ranks are threads. With NCCL each has a GPU of its own, and a test that needs more than there are is skipped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.patience import patient
from weightsync.errors import ConfigError, TransportError
from weightsync.transports import TRANSPORTS, Broadcast, Recv, Send, Transport, transport_class

NAMES = [pytest.param(name, marks=[pytest.mark.gpu] if name == "nccl" else []) for name in sorted(TRANSPORTS)]

Work = Callable[[Transport, int], object]


class Ring:
    """Ranks of one transport, each in a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.short_s = patient(2 if name == "nccl" else 0.5)
        self._made: list[Transport] = []
        self._pool = ThreadPoolExecutor(16)

    def run(self, num_ranks: int, work: Work, timeout_s: float = patient(20)) -> list[Future[object]]:
        """``work(transport, rank)`` on every rank of a new communicator, on the rank's own device.

        Operations have `timeout_s`; joining has longer.
        """
        if self.name == "nccl" and num_ranks > torch.cuda.device_count():
            pytest.skip(f"needs {num_ranks} GPUs")
        transports = [transport_class(self.name)() for _ in range(num_ranks)]
        self._made.extend(transports)
        address = transports[0].offer("127.0.0.1")

        def one(rank: int) -> object:
            if self.name == "nccl":
                torch.cuda.set_device(rank)
            transports[rank].open(address, rank, num_ranks, patient(20))
            transports[rank].set_timeout(timeout_s)
            return work(transports[rank], rank)

        return [self._pool.submit(one, rank) for rank in range(num_ranks)]

    def full(self, nbytes: int, value: int) -> torch.Tensor:
        """`nbytes` times `value` in the memory that the transport moves, on the thread's device."""
        device = "cuda" if self.name == "nccl" else "cpu"
        return torch.full((nbytes,), value, dtype=torch.uint8, device=device)

    def pattern(self, nbytes: int, key: int) -> torch.Tensor:
        """Bytes that differ from place to place and between keys."""
        return (torch.arange(nbytes) + 7 * key).remainder(251).to(torch.uint8).to(self.full(0, 0).device)

    def close(self) -> None:
        for transport in self._made:
            transport.close()
            transport.close()
        self._pool.shutdown()


@pytest.fixture(params=NAMES)
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    ring = Ring(request.param)
    yield ring
    ring.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_rank_has_the_roots_bytes(ring: Ring, num_ranks: int) -> None:
    sizes = [1, 255, 4096, 1_000_003]

    def work(transport: Transport, rank: int) -> list[bool]:
        right = []
        for root in range(num_ranks):
            for nbytes in sizes:
                wanted = ring.pattern(nbytes, root)
                data = wanted.clone() if rank == root else ring.full(nbytes, 255)
                transport.start([Broadcast(data, root)]).wait()
                right.append(torch.equal(data, wanted))
        return right

    for future in ring.run(num_ranks, work):
        assert future.result(patient(60)) == [True] * (num_ranks * len(sizes))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "size", [lambda root: 1000, lambda root: 1000 + 333 * root], ids=["equal", "unequal"]
)
def test_one_start_may_have_every_rank_as_a_root(
    ring: Ring, num_ranks: int, size: Callable[[int], int]
) -> None:
    parts = range(num_ranks)

    def work(transport: Transport, rank: int) -> list[bool]:
        wanted = [ring.pattern(size(root), root) for root in parts]
        bucket = ring.full(sum(map(size, parts)), 255)
        views = list(bucket.split([size(root) for root in parts]))
        views[rank].copy_(wanted[rank])
        transport.start([Broadcast(view, root) for root, view in enumerate(views)]).wait()
        return [torch.equal(view, want) for view, want in zip(views, wanted, strict=True)]

    for future in ring.run(num_ranks, work):
        assert future.result(patient(60)) == [True] * num_ranks


def test_roots_may_come_in_any_order_and_lie_apart(ring: Ring) -> None:
    def work(transport: Transport, rank: int) -> list[int]:
        bucket = ring.full(12, rank)
        transport.start([Broadcast(bucket[8:11], 1), Broadcast(bucket[1:4], 0)]).wait()
        return bucket.tolist()

    first, second = (future.result(patient(60)) for future in ring.run(2, work))
    assert first == [0] * 8 + [1] * 3 + [0]
    assert second == [1, 0, 0, 0] + [1] * 8


def test_a_broadcast_out_of_and_into_a_part_of_a_buffer_leaves_the_rest(ring: Ring) -> None:
    def work(transport: Transport, rank: int) -> list[int]:
        buffer = ring.full(10, rank)
        transport.start([Broadcast(buffer[3:6], 1)]).wait()
        return buffer.tolist()

    first, second = (future.result(patient(60)) for future in ring.run(2, work))
    assert first == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert second == [1] * 10


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_sends_to_the_next(ring: Ring, num_ranks: int) -> None:
    def work(transport: Transport, rank: int) -> bool:
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        received = ring.full(100_001, 255)
        transport.start([Send(ring.pattern(100_001, rank), after), Recv(received, before)]).wait()
        return torch.equal(received, ring.pattern(100_001, before))

    assert [future.result(patient(60)) for future in ring.run(num_ranks, work)] == [True] * num_ranks


def test_several_starts_are_pending_and_run_in_turn(ring: Ring) -> None:
    def work(transport: Transport, rank: int) -> bool:
        buckets = [
            ring.pattern(500_000, key) if rank == key % 2 else ring.full(500_000, 255) for key in range(6)
        ]
        pending = [transport.start([Broadcast(data, key % 2)]) for key, data in enumerate(buckets)]
        # What came from the other rank goes back to it: wrong unless starts keep their order.
        pending.append(transport.start([Broadcast(buckets[0], 1)]))
        for each in pending:
            each.wait()
        return all(torch.equal(data, ring.pattern(500_000, key)) for key, data in enumerate(buckets))

    assert [future.result(patient(60)) for future in ring.run(2, work)] == [True, True]


def test_what_is_over_before_it_is_waited_for_is_not_late(ring: Ring) -> None:
    def work(transport: Transport, rank: int) -> bool:
        data, more = ring.full(1000, rank), ring.full(1000, rank)
        pending = transport.start([Broadcast(data, 1)])
        threading.Event().wait(ring.short_s + 0.5)
        transport.start([Broadcast(more, 0)]).wait()
        pending.wait()
        return bool((data == 1).all() and (more == 0).all())

    assert [future.result(patient(60)) for future in ring.run(2, work, ring.short_s)] == [True, True]


def test_a_rank_that_never_comes_is_named_at_the_deadline(ring: Ring) -> None:
    finished = threading.Event()

    def work(transport: Transport, rank: int) -> float:
        transport.start([Broadcast(ring.full(1, 0), 0)]).wait()
        if rank == 1:
            finished.wait(patient(30))
            return 0.0
        data = ring.full(1 << 20, 0)
        started = time.monotonic()
        with pytest.raises(TransportError, match="rank 1 of 2 did not come to operation 2 within"):
            transport.start([Broadcast(data, 1)]).wait()
        finished.set()
        return time.monotonic() - started

    waited = ring.run(2, work, timeout_s=ring.short_s)[0].result(patient(60))
    assert ring.short_s - 0.1 < waited < ring.short_s + patient(10)


def test_a_rank_that_had_nothing_to_do_is_not_blamed(ring: Ring) -> None:
    """Rank 2 takes part in fewer operations; who is missing is counted between two ranks."""
    finished = threading.Event()

    def work(transport: Transport, rank: int) -> None:
        if rank < 2:
            move = Send if rank == 0 else Recv
            for _ in range(3):
                transport.start([move(ring.full(10, rank), 1 - rank)]).wait()
        if rank == 1:
            finished.wait(patient(30))
            return
        try:
            with pytest.raises(TransportError, match="rank 1 of 3 did not come to operation"):
                transport.start([Broadcast(ring.full(1 << 20, 0), 1)]).wait()
        finally:
            finished.set()

    for future in ring.run(3, work, timeout_s=ring.short_s):
        future.result(patient(60))


def test_a_rank_that_leaves_is_noticed_before_the_deadline(ring: Ring) -> None:
    left = threading.Event()

    def work(transport: Transport, rank: int) -> float:
        transport.start([Broadcast(ring.full(1, 0), 0)]).wait()
        if rank == 1:
            transport.close()
            left.set()
            return 0.0
        assert left.wait(patient(20))
        started = time.monotonic()
        with pytest.raises(TransportError):
            transport.start([Broadcast(ring.full(1 << 20, 0), 1)]).wait()
        return time.monotonic() - started

    assert ring.run(2, work, timeout_s=patient(40))[0].result(patient(60)) < patient(20)


def test_an_abort_from_another_thread_frees_a_waiting_rank_and_tells_its_peers(ring: Ring) -> None:
    waiting = threading.Event()

    def work(transport: Transport, rank: int) -> None:
        transport.start([Broadcast(ring.full(1, 0), 0)]).wait()
        if rank == 1:
            assert waiting.wait(patient(20))
            transport.abort("the controller said so")
            with pytest.raises(TransportError, match=r"^the controller said so$"):
                transport.start([Broadcast(ring.full(10, 0), 1)])
            return
        waiting.set()
        with pytest.raises(TransportError, match="rank 1 of 2 left before operation 2: the controller said"):
            transport.start([Broadcast(ring.full(1 << 20, 0), 1)]).wait()

    started = time.monotonic()
    for future in ring.run(2, work, timeout_s=patient(50)):
        future.result(patient(60))
    assert time.monotonic() - started < patient(30)


def test_ones_own_abort_is_raised_with_its_cause(ring: Ring) -> None:
    finished = threading.Event()

    def work(transport: Transport, rank: int) -> None:
        if rank == 0:
            threading.Timer(0.3, transport.abort, ["engine e1 died"]).start()
            with pytest.raises(TransportError, match=r"^engine e1 died$"):
                transport.start([Broadcast(ring.full(1 << 20, 0), 1)]).wait()
            finished.set()
        assert finished.wait(patient(30))

    for future in ring.run(2, work, timeout_s=patient(50)):
        future.result(patient(60))


def test_a_new_epoch_works_after_an_abort(ring: Ring) -> None:
    opened = threading.Barrier(2)  # who leaves at once breaks the connections that the other still makes

    def fail(transport: Transport, rank: int) -> None:
        opened.wait(patient(30))
        if rank == 0:
            transport.abort("a new membership")
        with pytest.raises(TransportError):
            transport.start([Broadcast(ring.full(1 << 20, 0), 0)]).wait()
        transport.close()

    def work(transport: Transport, rank: int) -> bool:
        data = ring.full(1000, rank)
        transport.start([Broadcast(data, 1)]).wait()
        return bool((data == 1).all())

    for _ in range(3):
        for future in ring.run(2, fail):
            future.result(patient(60))
    assert [future.result(patient(60)) for future in ring.run(2, work)] == [True, True]


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_never_joins_is_named(name: str) -> None:
    transport = transport_class(name)()
    address = transport.offer("127.0.0.1")
    with pytest.raises(TransportError, match=r"rank 0 of 2 .*rank 1 of 2 did not come"):
        transport.open(address, 0, 2, 0.5)
    transport.close()
    transport.close()


def test_an_unknown_transport_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gloo'"):
        transport_class("glo")
