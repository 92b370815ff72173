"""How an NCCL communicator ends, with an NCCL that hangs on command in place of the real one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.memory import cuda
from weightsync.transports import nccl as nccl_module
from weightsync.transports.base import Broadcast, Op, Recv, Send
from weightsync.transports.nccl import NcclTransport

SHORT_S = patient(0.5)
"""What ranks wait for one that is late; to sign in takes less."""


class NcclError(RuntimeError):
    pass


class FakeNccl:
    """Kernels and host calls end when `hold` is clear, or when their communicator is aborted."""

    NCCL_UINT8 = 1
    NcclError = NcclError
    available = True

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.hold_init, self.hold_host, self.hold_kernels = False, False, False
        self.async_error = False
        self.local = threading.local()
        outer = self

        class NcclCommunicator:
            comm = 0

            def __init__(self, num_ranks: int, unique_id: bytes, rank: int) -> None:
                self.aborted = threading.Event()
                self.comm = 1
                if outer.hold_init:
                    self.aborted.wait(patient(20))
                    raise NcclError("init aborted")

            def __getattr__(self, name: str) -> Callable[..., None]:
                def call(*args: int) -> None:
                    assert self.comm, "a call into an aborted communicator"
                    outer.local.comm = self
                    outer.calls.append((name, *args))

                return call

            def check_async_error(self) -> None:
                assert self.comm, "a call into an aborted communicator"
                if outer.async_error:
                    raise NcclError("remote process exited")

            def abort(self) -> None:
                outer.calls.append(("abort",))
                self.aborted.set()
                time.sleep(0.05)
                self.comm = 0

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self) -> bytes:
        return b"\x07" * 128

    def groupStart(self) -> None:  # noqa: N802
        self.calls.append(("groupStart",))

    def groupEnd(self) -> None:  # noqa: N802
        self.calls.append(("groupEnd",))
        if self.hold_host and self.local.comm.aborted.wait(patient(20)):
            raise NcclError("aborted")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """A fake in place of cupy's NCCL and of the little that is used of torch.cuda."""
    fake = FakeNccl()

    class Event:
        def record(self, stream: object) -> None:
            self.comm = fake.local.comm

        def query(self) -> bool:
            return bool(not fake.hold_kernels or self.comm.aborted.is_set())

    stream = SimpleNamespace(cuda_stream=99, wait_stream=lambda other: None)
    monkeypatch.setattr(cuda, "nccl", lambda: fake)
    monkeypatch.setattr(nccl_module, "_compare_versions", lambda: None)
    monkeypatch.setattr(nccl_module, "_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return fake


def data(address: int, nbytes: int) -> torch.Tensor:
    tensor = SimpleNamespace(is_cuda=True, data_ptr=lambda: address, numel=lambda: nbytes)
    return tensor  # type: ignore[return-value]


def opened(num_ranks: int, timeout_s: float) -> list[NcclTransport]:
    transports = [NcclTransport() for _ in range(num_ranks)]
    rendezvous = transports[0].offer("127.0.0.1")
    with ThreadPoolExecutor() as pool:
        for done in [
            pool.submit(transport.open, rendezvous, rank, num_ranks, timeout_s)
            for rank, transport in enumerate(transports)
        ]:
            done.result(patient(30))
    return transports


@pytest.fixture
def pair(fake: FakeNccl):
    transports = opened(2, SHORT_S)
    yield transports
    for transport in transports:
        transport.close()
        transport.close()


def broadcast(root: int) -> list[Op]:
    return [Broadcast(data(4096, 10), root)]


def test_a_kernel_that_waits_for_a_late_rank_is_aborted_and_the_rank_named(fake, pair) -> None:
    fake.hold_kernels = True
    pending = pair[0].start(broadcast(1))
    started = time.monotonic()
    with pytest.raises(TransportError, match=f"rank 1 of 2 did not come to operation 1 within {SHORT_S:g} s"):
        pending.wait()
    assert time.monotonic() - started < patient(5)
    assert ("abort",) in fake.calls


def test_a_host_call_that_waits_for_a_late_rank_is_aborted(fake, pair) -> None:
    fake.hold_host = True
    with pytest.raises(TransportError, match=f"rank 1 of 2 did not come to operation 1 within {SHORT_S:g} s"):
        pair[0].start(broadcast(1))


def test_an_abort_frees_a_host_call(fake, pair) -> None:
    fake.hold_host = True
    threading.Timer(0.2, pair[0].abort, ["engine e1 died"]).start()
    with pytest.raises(TransportError, match=r"^engine e1 died$"):
        pair[0].start(broadcast(1))


def test_nothing_is_called_after_an_abort(fake, pair) -> None:
    pair[0].abort("enough")
    num_calls = len(fake.calls)
    with pytest.raises(TransportError, match=r"^enough$"):
        pair[0].start(broadcast(1))
    pair[0].close()
    assert fake.calls[num_calls:] == []


def test_a_fault_that_nccl_knows_of_ends_the_wait_with_the_rank(fake, pair) -> None:
    fake.hold_kernels = True
    pending = pair[0].start(broadcast(1))
    fake.async_error = True
    with pytest.raises(TransportError, match="NCCL rank 0 of 2: remote process exited"):
        pending.wait()


def test_a_hung_init_is_aborted(fake) -> None:
    fake.hold_init = True
    with pytest.raises(TransportError, match=r"NCCL rank \d of 2 signed in with its peers, but"):
        opened(2, 0.3)
    deadline = time.monotonic() + patient(10)
    while fake.calls.count(("abort",)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_close_aborts_so_that_no_destructor_can_hang(fake) -> None:
    (transport,) = opened(1, 5.0)
    transport.start(broadcast(0)).wait()
    transport.close()
    transport.close()
    assert fake.calls.count(("abort",)) == 1


def issued(fake: FakeNccl, transport: NcclTransport, ops: list[Op]) -> list[tuple[object, ...]]:
    fake.calls.clear()
    transport.start(ops).wait()
    return [call for call in fake.calls if call[0] != "abort"]


def test_equal_neighbouring_parts_of_every_rank_are_one_all_gather(fake, pair) -> None:
    ops: list[Op] = [Broadcast(data(1000 + 64 * root, 64), root) for root in range(2)]
    assert issued(fake, pair[1], ops) == [("allGather", 1064, 1000, 64, 1, 99)]
    pair[1].use_all_gather = False
    assert issued(fake, pair[1], ops) == [
        ("groupStart",),
        ("broadcast", 1000, 1000, 64, 1, 0, 99),
        ("broadcast", 1064, 1064, 64, 1, 1, 99),
        ("groupEnd",),
    ]


@pytest.mark.parametrize(
    "ops",
    [
        [Broadcast(data(1000, 64), 0), Broadcast(data(1064, 65), 1)],
        [Broadcast(data(1000, 64), 0), Broadcast(data(1065, 64), 1)],
        [Broadcast(data(1000, 64), 1), Broadcast(data(1064, 64), 0)],
        [Broadcast(data(1000, 64), 0)],
        [Broadcast(data(1000, 64), 0), Broadcast(data(1064, 64), 1), Broadcast(data(1128, 64), 0)],
        [Send(data(1000, 64), 0), Recv(data(1064, 64), 0)],
    ],
)
def test_anything_else_is_a_group(fake, pair, ops: list[Op]) -> None:
    calls = issued(fake, pair[1], ops)
    assert calls[0] == ("groupStart",)
    assert calls[-1] == ("groupEnd",)
    assert len(calls) == len(ops) + 2
