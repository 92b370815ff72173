"""One suite for every way of reading peers: right bytes, deadlines kept, and nothing that lands afterwards.

Peers are processes of their own. "tcp" is left out where Mooncake does not load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pickle
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from tests.contract.reader_processes import Peer, pattern
from tests.patience import patient
from weightsync.errors import ConfigError, DeadlineError, ReadError, TransportError
from weightsync.memory.host import SharedBuffer
from weightsync.protocol.handles import Offer
from weightsync.readers import Read, Reader, choose_protocol, mooncake, open_reader, serve, ways
from weightsync.readers.base import pieces
from weightsync.readers.mooncake_process import probe
from weightsync.readers.zeromq_handshake import HandshakeServer, show_secret
from weightsync.readers.zeromq_server import CHUNK_NBYTES, ReadReply, Request

NO_MOONCAKE = probe("tcp", "")
WAYS = [
    "mapped",
    "zeromq",
    "curve",
    "unmapped",
    pytest.param("tcp", marks=pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)),
]
NETWORK = WAYS[1:]
PROTOCOLS = ["zeromq", "curve"] if NO_MOONCAKE else ["zeromq", "curve", "tcp"]
SERVED = [*PROTOCOLS, "unmapped"]
NBYTES = (16 << 20) + 13
SHORT_S = patient(0.5)
"""What a read waits for a peer that is stopped; those that are not come within it."""


class Targets:
    """Buffers to read into, and readers that fill them from `peers`."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self._buffers: list[SharedBuffer] = []
        self._readers: list[Reader] = []

    def buffer(self, nbytes: int = NBYTES) -> SharedBuffer:
        self._buffers.append(SharedBuffer.create(nbytes))
        return self._buffers[-1]

    def reader(self, way: str, targets: Sequence[SharedBuffer], peers: Sequence[Peer]) -> Reader:
        offers = {f"peer {peer.key}": peer.offer("zeromq" if way == "mapped" else way) for peer in peers}
        return self.open(targets, offers, way)

    def open(self, targets: Sequence[SharedBuffer], offers: dict[str, Offer], way: str) -> Reader:
        reader = open_reader(targets, offers, may_map=way == "mapped")
        self._readers.append(reader)
        assert set(reader.ways.values()) == {"zeromq" if way == "unmapped" else way}
        return reader

    def close(self) -> None:
        for each in (*self._readers, *self._buffers):
            each.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    found = [Peer(key, NBYTES, SERVED) for key in (1, 2, 3)]
    for peer in found:
        peer.offer(SERVED[0])  # it is there: tests stop it
    yield found
    for peer in found:
        peer.end()


@pytest.fixture(scope="module")
def mortals() -> Iterator[Iterator[Peer]]:
    """Peers for tests that kill them, one for each."""
    found = [Peer(key, NBYTES, SERVED) for key in range(4, 6 + len(SERVED))]
    yield iter(found)
    for peer in found:
        peer.end()


@pytest.fixture
def rig(peers: list[Peer]) -> Iterator[Targets]:
    found = Targets(peers)
    yield found
    found.close()


def whole(peer: Peer, target: int = 0) -> Read:
    return Read(f"peer {peer.key}", 0, target, 0, NBYTES)


@pytest.mark.parametrize("way", ["zeromq", "curve"])
def test_a_reader_that_nobody_closes_is_collected(rig: Targets, way: str) -> None:
    """Else the collector of garbage would wait for the reader's sockets."""
    offers = {f"peer {peer.key}": peer.offer(way) for peer in rig.peers}
    reader = weakref.ref(open_reader([rig.buffer()], offers, may_map=False))
    gc.collect()
    assert reader() is None


@pytest.mark.parametrize("way", WAYS)
def test_one_peer_fills_several_targets(rig: Targets, way: str) -> None:
    targets = [rig.buffer(), rig.buffer(1000)]
    reader = rig.reader(way, targets, rig.peers[:1])
    half = NBYTES // 2
    reads = [Read("peer 1", 0, 0, 0, half), Read("peer 1", half, 0, half, NBYTES - half)]
    reads += [Read("peer 1", 77, 1, 100, 3), Read("peer 1", 80, 1, 200, 0), Read("peer 1", 0, 1, 300, 5)]
    assert reader.read(reads, patient(20)) == {"peer 1": NBYTES + 8}
    wanted = pattern(NBYTES, 1)
    assert torch.equal(targets[0].tensor, wanted)
    small = torch.zeros(1000, dtype=torch.uint8)
    small[100:103], small[300:305] = wanted[77:80], wanted[:5]
    assert torch.equal(targets[1].tensor, small)
    assert reader.read([], 1) == {}


@pytest.mark.parametrize("way", WAYS)
def test_three_peers_fill_two_targets_at_once_and_again(rig: Targets, way: str) -> None:
    targets = [rig.buffer(), rig.buffer()]
    reader = rig.reader(way, targets, rig.peers)
    third = NBYTES // 3
    for turn in (0, 1):
        reads = [
            Read(f"peer {peer.key}", i * third + turn, turn, i * third, third)
            for i, peer in enumerate(rig.peers)
        ]
        assert reader.read(reads, patient(20)) == {f"peer {key}": third for key in (1, 2, 3)}
    for turn, target in enumerate(targets):
        for i in range(3):
            part = target.tensor[i * third : (i + 1) * third]
            assert torch.equal(part, pattern(NBYTES, i + 1)[i * third + turn :][:third])


def test_memory_that_nobody_can_map_is_read_over_the_network_on_its_own_host_too(rig: Targets) -> None:
    target = rig.buffer(1000)
    reader = open_reader([target], {"peer 1": rig.peers[0].offer("unmapped")}, may_map=True)
    with contextlib.closing(reader):
        assert reader.ways == {"peer 1": "zeromq"}
        reader.read([Read("peer 1", 5, 0, 0, 1000)], patient(5))
    assert torch.equal(target.tensor, pattern(NBYTES, 1)[5:1005])


def test_each_peer_is_read_its_own_way(rig: Targets) -> None:
    target = rig.buffer()
    offers = {
        f"peer {peer.key}": peer.offer(PROTOCOLS[i % len(PROTOCOLS)]) for i, peer in enumerate(rig.peers)
    }
    # On another host, the same process and descriptor may be memory of another name.
    memory = msgspec.structs.replace(offers["peer 2"].memory, name=offers["peer 1"].memory.name)
    offers["peer 1"] = dataclasses.replace(offers["peer 1"], memory=memory)
    reader = open_reader([target], offers)
    third = NBYTES // 3
    reads = [Read(f"peer {i + 1}", i * third, 0, i * third, third) for i in range(3)]
    assert reader.read(reads, patient(20)) == dict.fromkeys(offers, third)
    reader.close()
    assert reader.ways == {"peer 1": "zeromq", "peer 2": "mapped", "peer 3": "mapped"}
    for i in range(3):
        part = slice(i * third, (i + 1) * third)
        assert torch.equal(target.tensor[part], pattern(NBYTES, i + 1)[part])


@pytest.mark.parametrize("way", NETWORK)
def test_a_peer_that_stops_is_named_at_the_deadline_and_nothing_of_it_lands_later(
    rig: Targets, way: str
) -> None:
    _, stopped, sound = rig.peers
    targets = [rig.buffer(), rig.buffer()]
    reader = rig.reader(way, targets, [stopped, sound])
    reads = [whole(stopped, 0), whole(sound, 1)]
    reader.read(reads, patient(20))
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_until_it_fails, reader, reads, SHORT_S)
        stopped.signal(signal.SIGSTOP)
        try:
            error, seconds = reading.result(patient(20))
        finally:
            for target in targets:
                target.tensor.fill_(0x5A)
            stopped.signal(signal.SIGCONT)
    assert isinstance(error, DeadlineError)
    assert (error.phase, error.missing, error.timeout_s) == ("refill", (f"peer {stopped.key}",), SHORT_S)
    assert 0.9 * SHORT_S < seconds < SHORT_S + patient(5)
    nothing_lands(rig, way, stopped, targets)


@pytest.mark.parametrize("way", NETWORK)
def test_a_peer_that_hangs_before_it_is_met_holds_up_nobody_for_longer(rig: Targets, way: str) -> None:
    stopped, sound = rig.peers[:2]
    targets = [rig.buffer(), rig.buffer()]
    stopped.signal(signal.SIGSTOP)
    try:
        reader = rig.reader(way, targets, [stopped, sound])
        error, seconds = read_until_it_fails(reader, [whole(stopped, 0), whole(sound, 1)], SHORT_S)
        assert torch.equal(targets[1].tensor, pattern(NBYTES, sound.key))
        targets[0].tensor.fill_(0x5A)
    finally:
        stopped.signal(signal.SIGCONT)
    assert isinstance(error, DeadlineError)
    assert error.missing == (f"peer {stopped.key}",)
    assert 0.9 * SHORT_S < seconds < SHORT_S + patient(5)
    nothing_lands(rig, way, stopped, targets[:1])


def test_memory_of_a_stopped_neighbour_can_be_read(rig: Targets) -> None:
    target = rig.buffer()
    rig.peers[0].signal(signal.SIGSTOP)
    try:
        rig.reader("mapped", [target], rig.peers[:1]).read([whole(rig.peers[0])], patient(5))
    finally:
        rig.peers[0].signal(signal.SIGCONT)
    assert torch.equal(target.tensor, pattern(NBYTES, 1))


def test_a_copy_that_takes_too_long_is_named(rig: Targets) -> None:
    reader = rig.reader("mapped", [rig.buffer()], rig.peers[:1])
    with pytest.raises(DeadlineError, match="peer 1"):
        reader.read([whole(rig.peers[0])], 1e-4)


@pytest.mark.parametrize("way", NETWORK)
def test_a_peer_that_is_killed_is_named_soon(rig: Targets, mortals: Iterator[Peer], way: str) -> None:
    killed, sound = next(mortals), rig.peers[0]
    targets = [rig.buffer(), rig.buffer()]
    reader = rig.reader(way, targets, [killed, sound])
    reads = [whole(killed, 0), whole(sound, 1)]
    reader.read(reads, patient(20))
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_until_it_fails, reader, reads, patient(20))
        killed.end()
        at = time.monotonic()
        error, _ = reading.result(patient(20))
        assert time.monotonic() - at < patient(5)
    assert isinstance(error, ReadError)
    assert error.peer == f"peer {killed.key}"
    for again in (reader, rig.reader(way, targets, [killed, sound])):
        with pytest.raises(TransportError):
            again.read(reads, patient(20))


def test_a_neighbour_that_is_gone_is_named_by_its_protocol(rig: Targets, mortals: Iterator[Peer]) -> None:
    gone, targets = next(mortals), [rig.buffer()]
    reader = rig.reader("mapped", targets, [gone])
    gone.leave()
    again = open_reader(targets, {f"peer {gone.key}": gone.offer("zeromq")})
    assert again.ways == {f"peer {gone.key}": "zeromq"}
    with contextlib.closing(again), pytest.raises(ReadError, match=f"peer {gone.key} could not be read"):
        again.read([whole(gone)], patient(5))
    reader.read([whole(gone)], patient(5))  # what is mapped stays
    assert torch.equal(targets[0].tensor, pattern(NBYTES, gone.key))


@pytest.mark.parametrize("way", WAYS)
def test_a_close_from_another_thread_ends_a_read_at_once(rig: Targets, way: str) -> None:
    target = rig.buffer()
    reader = rig.reader(way, [target], rig.peers[:1])
    reads = [whole(rig.peers[0])]
    reader.read(reads, patient(20))
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_until_it_fails, reader, reads, patient(20))
        threading.Event().wait(0.02)
        started = time.monotonic()
        reader.close()
        assert time.monotonic() - started < patient(5)
        target.tensor.fill_(0x5A)
        error, _ = reading.result(patient(5))
    assert type(error) is TransportError
    assert str(error) == "the reader is closed"
    nothing_lands(rig, way, rig.peers[0], [target])
    reader.close()


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_a_peer_does_not_have_are_refused(rig: Targets, way: str) -> None:
    target = rig.buffer(10)
    reader = rig.reader(way, [target], rig.peers[:1])
    for read in (
        Read("peer 1", NBYTES - 5, 0, 0, 6),
        Read("peer 1", -1, 0, 0, 1),
        Read("peer 1", 0, 0, 5, 6),
        Read("peer 1", 0, 1, 0, 1),
        Read("peer 2", 0, 0, 0, 1),
    ):
        with pytest.raises(ReadError) as caught:
            reader.read([read], patient(5))
        assert caught.value.peer == read.peer
    assert reader.read([Read("peer 1", NBYTES - 10, 0, 0, 10)], patient(5)) == {"peer 1": 10}
    offer = rig.peers[0].offer("zeromq" if way == "mapped" else way)
    memory = msgspec.structs.replace(offer.memory, nbytes=NBYTES + 4096)
    offer = dataclasses.replace(offer, memory=memory)
    with pytest.raises(ReadError) as caught:
        rig.open([target], {"peer 1": offer}, way).read([Read("peer 1", NBYTES + 4000, 0, 0, 6)], patient(5))
    assert caught.value.peer == "peer 1"
    assert target.tensor.tolist() == pattern(NBYTES, 1)[-10:].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_twenty_readers_leave_nothing_behind(rig: Targets, way: str) -> None:
    target = rig.buffer(1 << 20)

    def cycle() -> None:
        reader = rig.reader(way, [target], rig.peers[:2])
        reader.read([Read("peer 1", 0, 0, 0, 1 << 19), Read("peer 2", 0, 0, 1 << 19, 1 << 19)], 10)
        reader.close()

    cycle()  # what libraries keep for good
    before = left_behind()
    for _ in range(20 if way != "tcp" else 5):
        cycle()
    nothing_is_left(before)


@pytest.mark.parametrize("way", PROTOCOLS)
def test_servers_leave_nothing_behind_and_their_readers_fail(rig: Targets, way: str) -> None:
    source, target = rig.buffer(1000), rig.buffer(1000)
    source.tensor.copy_(pattern(1000, 9))
    serve(source, "h9", "127.0.0.1", way).close()
    before = left_behind()
    server = serve(source, "h9", "127.0.0.1", way)
    reader = rig.open([target], {"h9": server.offer}, way)
    assert reader.read([Read("h9", 0, 0, 0, 1000)], patient(5)) == {"h9": 1000}
    server.close()
    server.close()
    with pytest.raises(ReadError, match="h9"):
        reader.read([Read("h9", 0, 0, 0, 1000)], patient(5))
    reader.close()
    assert torch.equal(target.tensor, source.tensor)
    nothing_is_left(before)


@pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)
def test_a_process_of_mooncake_ends_with_its_parent(rig: Targets, mortals: Iterator[Peer]) -> None:
    peer = next(mortals)
    port = peer.offer("tcp").endpoint.rpartition(":")[2]
    assert is_listening(port)
    os.kill(peer.offer("tcp").memory.pid, signal.SIGKILL)  # not its group
    deadline = time.monotonic() + patient(10)
    while is_listening(port):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("way", ["zeromq", "curve"])
def test_a_wrong_secret_is_refused(rig: Targets, way: str) -> None:
    target, offer = rig.buffer(10), rig.peers[0].offer(way)
    own = zmq.curve_keypair()[1].decode()
    secret = offer.secret[:40] + own if way == "curve" else secrets.token_hex(32)
    reader = rig.open([target], {"peer 1": dataclasses.replace(offer, secret=secret)}, way)
    with pytest.raises(ReadError, match="peer 1 could not be read: the secret is wrong"):
        reader.read([Read("peer 1", 0, 0, 0, 10)], patient(5))
    assert not target.tensor.any()


def test_what_is_encrypted_is_not_read_without_encryption(rig: Targets) -> None:
    target, offer = rig.buffer(10), rig.peers[0].offer("curve")
    reader = rig.open([target], {"peer 1": dataclasses.replace(offer, protocol="zeromq")}, "zeromq")
    with pytest.raises(ReadError, match="peer 1 could not be read"):
        reader.read([Read("peer 1", 0, 0, 0, 10)], patient(5))
    assert not target.tensor.any()


def test_a_secret_refused_before_the_first_read_is_named_too(rig: Targets) -> None:
    target = rig.buffer(10)
    offer = dataclasses.replace(rig.peers[0].offer("zeromq"), secret=secrets.token_hex(32))
    for _ in range(20):
        reader = rig.open([target], {"peer 1": offer}, "zeromq")
        other = rig.reader("zeromq", [rig.buffer(10)], rig.peers[:1])
        other.read([Read("peer 1", 0, 0, 0, 10)], patient(5))  # the wrong one has been answered, too
        with pytest.raises(ReadError, match="peer 1 could not be read: the secret is wrong"):
            reader.read([Read("peer 1", 0, 0, 0, 10)], patient(5))
        reader.close()
        other.close()


def test_what_is_no_request_does_not_end_a_server(rig: Targets) -> None:
    offer = rig.peers[0].offer("zeromq")
    too_far = msgspec.msgpack.encode(Request(3, 1 << 62, 1 << 62))
    too_much = msgspec.msgpack.encode(Request(3, 0, CHUNK_NBYTES + 1))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        show_secret(socket, offer.secret)
        socket.connect(offer.endpoint)
        for frames in (
            [b""],
            [b"x"],
            [b"x" * 24],
            [too_far],
            [too_far, b""],
            [too_much],
            [msgpack([1, -1, 2])],
        ):
            socket.send_multipart(frames)
            assert socket.poll(int(1000 * patient(5)))
            (answer,) = socket.recv_multipart()
            assert msgspec.msgpack.decode(answer, type=ReadReply).refusal
        socket.send(bytes(1 << 20))  # more than a server takes: it hangs up
    target = rig.buffer(10)
    assert rig.open([target], {"peer 1": offer}, "zeromq").read([Read("peer 1", 0, 0, 0, 10)], patient(5))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda ticket: [msgpack([ticket]), b"x" * 9], "it sent 9 bytes where 10 were asked for"),
        (lambda ticket: [msgpack([ticket]), b"x" * 11], "it sent 11 bytes where 10"),
        (lambda ticket: [msgpack([ticket])], "it answered what it was not asked"),
        (lambda ticket: [msgpack([ticket]), b"x" * 10, b""], "it answered what it was not asked"),
        (lambda ticket: [msgpack([ticket + 1]), b"x" * 10], "it answered what it was not asked"),
        (lambda ticket: [msgpack([ticket, "why not"])], "it refused: why not"),
        (lambda _: [b"x", b"x" * 10], "not a message of ours"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_fails_the_read(rig: Targets, answer, problem: str) -> None:
    class Wrong(HandshakeServer):
        def answer(self, frames: Sequence[bytes]) -> Sequence[bytes]:
            return answer(msgspec.msgpack.decode(frames[0], type=Request).ticket)

    target = rig.buffer(10)
    with contextlib.closing(Wrong("127.0.0.1", None, 256, "no test")) as server:
        offer = dataclasses.replace(
            rig.peers[0].offer("zeromq"), endpoint=server.endpoint, secret=server.secret
        )
        reader = rig.open([target], {"peer 1": offer}, "zeromq")
        with pytest.raises(ReadError, match=f"peer 1 could not be read: {problem}"):
            reader.read([Read("peer 1", 0, 0, 0, 10)], patient(5))
    assert not target.tensor.any()


def test_an_offer_travels_and_keeps_its_secret_to_itself(rig: Targets) -> None:
    offer = rig.peers[0].offer("zeromq")
    assert pickle.loads(pickle.dumps(offer)) == offer
    assert len(offer.secret) == 64
    assert repr(offer.secret) not in repr(offer)
    assert "secret" not in repr(offer)


def test_neighbours_are_joined_and_long_reads_cut() -> None:
    reads = [Read("p", 0, 0, 5, 3), Read("p", 3, 0, 8, 4), Read("p", 7, 1, 12, 2), Read("p", 9, 1, 15, 2)]
    assert list(pieces(reads, 5)) == [
        Read("p", 0, 0, 5, 5),
        Read("p", 5, 0, 10, 2),
        Read("p", 7, 1, 12, 2),
        Read("p", 9, 1, 15, 2),
    ]
    assert list(pieces([], 5)) == []


class TestChoice:
    @pytest.fixture(autouse=True)
    def _host(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.problems: dict[str, str] = {}
        (tmp_path / "mlx5_0").mkdir()
        monkeypatch.setattr(ways, "DEVICES", tmp_path)
        monkeypatch.setattr(mooncake.importlib.util, "find_spec", lambda _: "found")
        monkeypatch.setattr(mooncake, "probe", lambda protocol, _: self.problems.get(protocol, ""))

    def test_auto_takes_the_first_that_starts(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        assert choose_protocol("auto") == "rdma"
        assert [record.getMessage() for record in caplog.records] == [
            "peers on other hosts are read over RDMA (mlx5_0) with Mooncake"
        ]
        self.problems["rdma"] = "status -1"
        assert choose_protocol("auto") == "tcp"
        assert "cannot be read over rdma: status -1" in caplog.text
        self.problems["tcp"] = "no libibverbs"
        assert choose_protocol("auto") == "zeromq"

    def test_without_mooncake_or_a_device_nobody_is_warned(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(ways, "DEVICES", tmp_path / "none")
        assert choose_protocol("auto") == "tcp"
        with pytest.raises(ConfigError, match=r"sync\.refill.*no RDMA device"):
            choose_protocol("rdma")
        monkeypatch.setattr(mooncake.importlib.util, "find_spec", lambda _: None)
        assert choose_protocol("auto") == choose_protocol("zeromq") == "zeromq"
        with pytest.raises(ConfigError, match=r"weightsync\[mooncake\]"):
            choose_protocol("tcp")
        assert caplog.records == []

    @pytest.mark.skipif(not NO_MOONCAKE, reason="Mooncake is installed")
    def test_a_server_that_cannot_start_mooncake_says_so(self) -> None:
        buffer = SharedBuffer.create(4096)
        with contextlib.closing(buffer), pytest.raises(TransportError, match="Mooncake cannot be imported"):
            serve(buffer, "h0", "127.0.0.1", "tcp")

    def test_what_was_asked_for_is_not_replaced(self) -> None:
        self.problems |= {"rdma": "status -1"}
        with pytest.raises(ConfigError, match="status -1"):
            choose_protocol("rdma", "mlx5_0")
        assert choose_protocol("tcp", "mlx5_0") == "tcp"

    @pytest.mark.parametrize("wanted", ["auto", "rdma"])
    def test_an_unknown_device_is_told_the_known(self, wanted: str) -> None:
        with pytest.raises(ConfigError, match=r"sync\.rdma_device: 'mlx5_9' .* this host has mlx5_0"):
            choose_protocol(wanted, "mlx5_0,mlx5_9")

    def test_a_way_of_ones_own_is_one_module_and_one_line(
        self, rig: Targets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Named like another way in the registry, and found, served and read under its own name."""
        own = dataclasses.replace(ways.NETWORK["zeromq"], module="tests.contract.own_reader")
        monkeypatch.setitem(ways.NETWORK, "own", own)  # type: ignore[arg-type]
        assert choose_protocol("own") == "own"
        source, target = rig.buffer(100), rig.buffer(100)
        source.tensor.fill_(7)
        with contextlib.closing(serve(source, "h0", "127.0.0.1", "own")) as server:
            reader = open_reader([target], {"h0": server.offer}, may_map=False)
            with contextlib.closing(reader):
                assert reader.read([Read("h0", 0, 0, 0, 100)], patient(1)) == {"h0": 100}
        assert reader.ways == {"h0": "own"}
        assert target.tensor.eq(7).all()

    def test_an_unknown_protocol_is_refused(self, rig: Targets) -> None:
        with pytest.raises(ConfigError, match="did you mean 'zeromq'"):
            choose_protocol("zeromk")
        with pytest.raises(ConfigError, match="did you mean 'tcp'"):
            serve(rig.buffer(1), "h", "127.0.0.1", "tpc")


@pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)
def test_mooncake_keeps_to_its_range_of_ports_or_is_refused(rig: Targets) -> None:
    server = serve(rig.buffer(1), "h", "127.0.0.1", "tcp", "", (26000, 26099))
    with contextlib.closing(server):
        assert 26000 <= int(server.offer.endpoint.rpartition(":")[2]) <= 26099
        with pytest.raises(ConfigError, match=r"sync\.ports: '40000-40099' .* outside 32768-60999"):
            serve(rig.buffer(1), "h", "127.0.0.1", "tcp", "", (40000, 40099))


def test_an_address_that_is_not_ours_cannot_be_served_on(rig: Targets) -> None:
    with pytest.raises(TransportError, match=r"h cannot serve on 192\.0\.2\.1"):
        serve(rig.buffer(1), "h", "192.0.2.1", "zeromq")


def msgpack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def read_until_it_fails(
    reader: Reader, reads: Sequence[Read], timeout_s: float
) -> tuple[TransportError | DeadlineError, float]:
    """So that whatever happens to a peer happens in a read. With the seconds that the last one took."""
    while True:
        started = time.monotonic()
        try:
            reader.read(reads, timeout_s)
        except (TransportError, DeadlineError) as error:
            return error, time.monotonic() - started


def nothing_lands(rig: Targets, way: str, peer: Peer, targets: Sequence[SharedBuffer]) -> None:
    """`targets` keep what they hold, 0x5A, while `peer` works through what it was asked before."""
    other = rig.buffer()
    for _ in range(2):
        rig.reader(way, [other], [peer]).read([whole(peer)], patient(20))
    assert torch.equal(other.tensor, pattern(NBYTES, peer.key))
    for target in targets:
        assert bool((target.tensor == 0x5A).all())


def left_behind() -> tuple[int, int, int]:
    """How many descriptors, threads and children this process has."""
    tasks, num_children = os.listdir("/proc/self/task"), 0
    for task in tasks:
        with contextlib.suppress(OSError):  # it has ended since
            num_children += len(Path(f"/proc/self/task/{task}/children").read_text().split())
    return len(os.listdir("/proc/self/fd")), len(tasks), num_children


def nothing_is_left(before: tuple[int, int, int]) -> None:
    """No more than `before`, at the latest when the kernel is done with threads that have ended."""
    deadline = time.monotonic() + patient(10)
    while any(now > then for now, then in zip(left_behind(), before, strict=True)):
        assert time.monotonic() < deadline, (before, left_behind())
        threading.Event().wait(0.01)


def is_listening(port: str) -> bool:
    rows = Path("/proc/net/tcp").read_text().split("\n")[1:-1]
    return any(row.split()[1].endswith(f":{int(port):04X}") and row.split()[3] == "0A" for row in rows)
