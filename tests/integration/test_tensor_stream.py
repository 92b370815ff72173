"""Named tensors through gloo, ranks as threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import patient
from weightsync.collectives import tensor_stream
from weightsync.collectives.tensor_stream import TensorStream
from weightsync.errors import ConfigError, TransportError, VerifyError, WireError
from weightsync.transports import Transport
from weightsync.transports.gloo import GlooTransport

TIMEOUT_S = patient(20)
HOST = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def transports(pool: ThreadPoolExecutor) -> Iterator[list[Transport]]:
    made = [GlooTransport() for _ in range(3)]
    address = made[0].offer("127.0.0.1")
    for each in [pool.submit(t.open, address, r, 3, TIMEOUT_S) for r, t in enumerate(made)]:
        each.result()
    yield made
    for transport in made:
        transport.close()


def send(stream: TensorStream, tensors: dict[str, torch.Tensor], version: int = 1) -> None:
    with stream.sending(version) as put:
        for name, tensor in tensors.items():
            put(name, tensor)


def receive(stream: TensorStream) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for batch in stream.receiving() for name, tensor in batch}


def draw(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    bits = torch.Generator().manual_seed(seed)
    nbytes = int(torch.tensor(shape).prod()) * dtype.itemsize if shape else dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=bits).view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6),
    bucket_nbytes=st.integers(16, 400),
)
def test_all_arrive_whatever_their_shapes_and_the_buckets(pool, transports, kinds, bucket_nbytes) -> None:
    tensors = {f"t{i}": draw(dtype, shape, i) for i, (dtype, shape) in enumerate(kinds)}
    streams = [TensorStream(t, r, 3, HOST, bucket_nbytes) for r, t in enumerate(transports)]
    sent = pool.submit(send, streams[0], tensors)
    for coming in [pool.submit(receive, stream) for stream in streams[1:]]:
        arrived = coming.result(TIMEOUT_S)
        assert list(arrived) == list(tensors)
        assert all(same(arrived[name], tensors[name]) for name in tensors)
    sent.result(TIMEOUT_S)


def test_a_view_and_a_second_version(pool, transports) -> None:
    streams = [TensorStream(t, r, 3, HOST) for r, t in enumerate(transports)]
    for version in (1, 2):
        weight = torch.arange(12.0).reshape(3, 4).t() * version
        sent = pool.submit(send, streams[0], {"weight": weight}, version)
        for coming in [pool.submit(receive, stream) for stream in streams[1:]]:
            assert torch.equal(coming.result(TIMEOUT_S)["weight"], weight)
        sent.result(TIMEOUT_S)


class LateTransport:
    """Sends each message only when it is waited for, as NCCL may."""

    def __init__(self) -> None:
        self.were_there: list[bool] = []

    def start(self, ops) -> SimpleNamespace:
        (message,) = (weakref.ref(op.data) for op in ops)
        return SimpleNamespace(wait=lambda: self.were_there.append(message() is not None))


def test_messages_keep_their_memory_until_they_have_been_sent() -> None:
    transport = LateTransport()
    send(TensorStream(transport, 0, 1, HOST, 64), {f"t{i}": torch.ones(20) for i in range(5)})
    assert len(transport.were_there) > 15
    assert all(transport.were_there)


class Bus:
    """What ranks broadcast, by number. gloo would keep what was aborted until its own time-out."""

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}
        self.cause = ""
        self.changed = threading.Condition()


class BusTransport:
    """Rank `rank` on a bus; it finds one bit of byte `at` of operation `flips` wrong."""

    def __init__(self, bus: Bus, rank: int, flips: int = -1, at: int = 5) -> None:
        self.bus, self._rank, self.flips, self.at, self._number = bus, rank, flips, at, 0

    def start(self, ops) -> BusTransport.Pending:
        (op,) = ops
        self._number += 1
        with self.bus.changed:
            if op.root == self._rank:
                self.bus.sent[self._number] = op.data.numpy().tobytes()
            self.bus.changed.notify_all()
        return self.Pending(self, self._number, op.data)

    def abort(self, cause: str) -> None:
        with self.bus.changed:
            self.bus.cause = self.bus.cause or cause
            self.bus.changed.notify_all()

    class Pending:
        def __init__(self, transport: BusTransport, number: int, data: torch.Tensor) -> None:
            self._transport, self._number, self._data = transport, number, data

        def wait(self) -> None:
            bus = self._transport.bus
            with bus.changed:
                came = bus.changed.wait_for(lambda: self._number in bus.sent or bus.cause, TIMEOUT_S)
                assert came, "nobody sent it"
                if bus.cause:
                    raise TransportError(bus.cause)
            came = bytearray(bus.sent[self._number])
            if self._number == self._transport.flips:
                came[self._transport.at] ^= 1
            self._data.copy_(torch.frombuffer(came, dtype=torch.uint8))


@pytest.fixture
def bus() -> Bus:
    return Bus()


def test_wrong_bytes_are_named_and_not_handed_over(pool, bus: Bus) -> None:
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(6)}
    sender = TensorStream(BusTransport(bus, 0), 0, 2, HOST, 64)
    receiver = TensorStream(BusTransport(bus, 1, flips=6), 1, 2, HOST, 64)  # the second bucket's data
    sent = pool.submit(send, sender, tensors, 7)
    coming = receiver.receiving()
    assert [name for name, _ in next(coming)] == ["t0", "t1"]
    with pytest.raises(VerifyError, match=r"rank 1, version 7: wrong bytes in t2$"):
        next(coming)
    with pytest.raises(TransportError, match=r"rank 1 gave up: .* wrong bytes in t2"):
        sent.result(TIMEOUT_S)


@pytest.mark.parametrize("number", [4, 5], ids=["sizes", "names and shapes"])
def test_no_flipped_bit_of_a_buckets_head_is_believed(pool, number: int) -> None:
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(4)}
    for at in range(-32, 32):
        sender = TensorStream(BusTransport(bus := Bus(), 0), 0, 2, HOST, 64)
        sent = pool.submit(send, sender, tensors)
        with pytest.raises(WireError, match="rank 1: a bucket's head is damaged"):
            receive(TensorStream(BusTransport(bus, 1, number, at), 1, 2, HOST, 64))
        with pytest.raises(TransportError, match=r"rank 1 gave up: .* is damaged"):
            sent.result(TIMEOUT_S)


def test_what_changes_before_it_is_packed_or_after_it_is_handed_over_is_noticed_by_nobody(
    pool, transports
) -> None:
    streams = [TensorStream(t, r, 3, HOST) for r, t in enumerate(transports)]
    model = {"a": torch.zeros(5), "b": torch.zeros(5)}

    def send_and_step() -> None:
        with streams[0].sending(1) as put:
            put("a", model["a"])
            model["b"] += 1
            put("b", model["b"])

    def load_otherwise(stream: TensorStream) -> dict[str, torch.Tensor]:
        return {name: tensor.add_(7).clone() for batch in stream.receiving() for name, tensor in batch}

    sent = pool.submit(send_and_step)
    for coming in [pool.submit(load_otherwise, stream) for stream in streams[1:]]:
        arrived = coming.result(TIMEOUT_S)
        assert (arrived["a"].unique().tolist(), arrived["b"].unique().tolist()) == ([7.0], [8.0])
    sent.result(TIMEOUT_S)


def test_who_gives_up_is_not_waited_for(pool, bus: Bus) -> None:
    tensors = {f"t{i}": torch.ones(8) for i in range(100)}
    sent = pool.submit(send, TensorStream(BusTransport(bus, 0), 0, 2, HOST, 64), tensors)
    coming = TensorStream(BusTransport(bus, 1), 1, 2, HOST).receiving()
    next(coming)
    coming.close()
    with pytest.raises(TransportError, match="rank 1 gave up: it took no more"):
        sent.result(TIMEOUT_S)


def test_a_source_that_fails_is_told(pool, bus: Bus) -> None:
    def fail(stream: TensorStream) -> None:
        with stream.sending(1) as put:
            put("weight", torch.ones(8))
            raise KeyError("no more weights")

    sent = pool.submit(fail, TensorStream(BusTransport(bus, 0), 0, 2, HOST))
    with pytest.raises(TransportError, match="rank 0 gave up: KeyError: 'no more weights'"):
        receive(TensorStream(BusTransport(bus, 1), 1, 2, HOST))
    with pytest.raises(KeyError):
        sent.result(TIMEOUT_S)


def test_a_bucket_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_nbytes: 8"):
        TensorStream(GlooTransport(), 0, 2, HOST, 8)


def test_one_digest_table_is_kept_of_a_bucket_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Table:
        def __init__(self, cuts) -> None:
            self.address = cuts[0][1].data_ptr() if cuts else 0
            made.append(self.address)

        def launch(self, _: object) -> None: ...

        def result(self) -> list[int]:
            return [self.address]

    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(tensor_stream, "_table", Table)
    digester, buckets = tensor_stream._Digester(), [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    one, other = (data.data_ptr() for data in buckets)
    chunk = tensor_stream._Chunk("t", "float32", (4,), 0, 4, 0)
    for data in (buckets[0], buckets[0], buckets[1], buckets[0]):
        assert digester._on_device(data, [(chunk, data.view(torch.float32))]) == [data.data_ptr()]
    assert made == [one, other, one]
    assert len(digester._tables) == 1
    assert digester._on_device(buckets[0][:0], []) == [0]  # an empty tensor has no address
