"""Bytes that are no message, at every socket of ours: the owner refuses them and serves a right peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Queue
from typing import Any, Protocol

import msgspec
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign import NASTY, foreign
from tests.patience import patient
from tests.unit.channel.test_wire import MESSAGES
from tests.unit.protocol.test_decoding import REPLIES
from weightsync.actors.ray.loop import LoopThread
from weightsync.channel.feed import EngineFeed, HolderFeed
from weightsync.channel.wire import encode
from weightsync.engines.sglang.rank_calls import Replies, reply, sockets
from weightsync.errors import ReadError, TransportError, WireError
from weightsync.memory.host import SharedBuffer
from weightsync.node.codec import encode as value_bytes
from weightsync.node.link import Link, Links
from weightsync.node.messages import Answer, Ask, FromNode, NodeOffer, Raised, Welcome, from_node
from weightsync.node.messages import Hello as NodeHello
from weightsync.node.node import Node
from weightsync.plan import Layout, Members, make_plan
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.listener import Listener
from weightsync.protocol.ports import listen
from weightsync.protocol.stream import Stream
from weightsync.readers import Read, open_reader, serve
from weightsync.readers.zeromq_handshake import HandshakeServer, dial, hang_up
from weightsync.readers.zeromq_server import Request
from weightsync.testing import DictEngine
from weightsync.transports.roll_call import RollCall
from weightsync.transports.store import NetworkStore, StoreServer

WAIT_S = patient(10)


@dataclass(frozen=True)
class Door:
    """A socket of ours: `send` says something from a new connection, `serve` is what a right peer does."""

    send: Callable[[bytes], None]
    serve: Callable[[], None]


def packed(*messages: object) -> list[bytes]:
    return [msgspec.msgpack.encode(each) for each in messages]


@contextmanager
def by_zeromq(kind: int, endpoint: str) -> Iterator[Callable[[bytes], None]]:
    """Connect anew for each message: a peer whose message is too long is disconnected."""
    with zmq.Context() as context, ExitStack() as peers:

        def send(data: bytes) -> None:
            peer = peers.enter_context(context.socket(kind))
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(endpoint)
            peer.send(data)

        yield send


@contextmanager
def engine_rank() -> Iterator[Door]:
    """A holder that waits for its engine rank."""
    layout = Layout.from_ranks(list(DictEngine("e0", {"a": torch.zeros(10)}).layout()))
    members = Members(2, (0,), (("e0", (1,)),))
    plan = make_plan(layout, {"e0": layout}, members, bucket_bytes=1024, max_staging_bytes=1 << 20)
    slots = [SharedBuffer.create(plan.max_bucket_nbytes) for _ in range(plan.slots)]
    feed = HolderFeed("holder 1", "e0", tuple(slot.handle for slot in slots), None, -1)
    accepting = on_daemon(lambda: feed.accept(plan.digest(), WAIT_S))

    def serve() -> None:
        engine = EngineFeed.open(feed.ticket, plan, WAIT_S)
        accepting.result(WAIT_S)
        engine.allow_writing()
        while not feed.is_writable():
            assert not accepting.exception()
        engine.close()

    with by_zeromq(zmq.DEALER, feed.ticket.endpoint) as send:
        yield Door(send, serve)
    feed.close()
    for slot in slots:
        slot.close()


@contextmanager
def sglang_rank() -> Iterator[Door]:
    """An engine that waits for what its ranks answer."""
    replies = Replies("e0", 1)

    def serve() -> None:
        calls = replies.calls(None, "close", b"")
        reply(calls[0], None)
        assert replies.collect(calls, WAIT_S) == [None]

    with by_zeromq(zmq.PUSH, replies.endpoint) as send:
        yield Door(send, serve)
    sockets.pop(replies.endpoint).close()
    replies.close()


@contextmanager
def reader() -> Iterator[Door]:
    """A holder whose memory others read. Strangers have its secret here, as in what follows."""
    source, target = SharedBuffer.create(100), SharedBuffer.create(100)
    source.tensor.fill_(7)
    server = serve(source, "h1", "127.0.0.1", "zeromq")

    def read() -> None:
        target.tensor.zero_()
        with closing(open_reader([target], {"h1": server.offer}, may_map=False)) as own:
            own.read([Read("h1", 0, 0, 0, 100)], WAIT_S)
        assert torch.equal(target.tensor, source.tensor)

    with zmq.Context() as context, ExitStack() as peers:

        def send(data: bytes) -> None:
            peer = dial(context, server.offer.endpoint, server.offer.secret, 1 << 20)
            peers.callback(hang_up, *peer)
            peer[0].send(data)

        yield Door(send, read)
    for each in (server, source, target):
        each.close()


@contextmanager
def by_stream(endpoint: str, secret: str) -> Iterator[Callable[[bytes], None]]:
    with ExitStack() as peers:
        yield lambda data: peers.enter_context(closing(Stream(endpoint, secret, 1 << 20, WAIT_S))).send(data)


@contextmanager
def store() -> Iterator[Door]:
    """Where the ranks of a communicator meet."""
    with closing(StoreServer("127.0.0.1")) as server:

        def meet() -> None:
            with closing(NetworkStore(server.address, WAIT_S)) as rank:
                rank.set("own", "value")
                assert rank.get("own") == b"value"

        secret, _, place = server.address.rpartition("@")
        with by_stream(f"tcp://{place}", secret) as send:
            yield Door(send, meet)


class Numbered(Protocol):
    async def resume(self, version: int) -> None: ...


class Process:
    """A process that the driver calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def resume(self, version: int) -> None:
        self.asked.append(version)


@contextmanager
def driver(*, greets: bool) -> Iterator[Door]:
    """The driver, for a process that has its place if it `greets`."""
    loop, name = LoopThread(), "engine e0"

    async def begin() -> tuple[Links, Link, NodeOffer, NodeOffer]:
        links, link = Links("127.0.0.1"), Link(name, Numbered)
        return links, link, links.offer(link), links.offer(Link("engine e1", Numbered))

    links, link, own, other = loop.run_concurrently(begin()).result(WAIT_S)

    async def call() -> None:
        await link.call("resume", 3)

    def serve() -> None:
        node = Node(own, process := Process(), Numbered)
        serving = on_daemon(lambda: asyncio.run(node.serve()))
        loop.run_concurrently(call()).result(WAIT_S)
        assert process.asked == [3]
        loop.run_concurrently(links.close()).result(WAIT_S)
        serving.result(WAIT_S)

    with by_stream(other.endpoint, other.secret) as send:
        hello = itertools.count()

        def greet(data: bytes) -> None:
            """Say hello as the process that has the place, and then `data`."""
            peer = peers.enter_context(closing(Stream(other.endpoint, other.secret, 1 << 20, WAIT_S)))
            peer.send(msgspec.msgpack.encode(NodeHello("own", frozenset({next(hello)}))))
            with suppress(OSError):  # it is refused, or has been replaced
                peer.send(data)

        with ExitStack() as peers:
            yield Door(greet if greets else send, serve)
    loop.close()


DOORS: dict[str, tuple[Callable[[], AbstractContextManager[Door]], Sequence[bytes]]] = {
    "engine rank": (engine_rank, [encode(each) for each in MESSAGES]),
    "SGLang rank": (
        sglang_rank,
        packed({"secret": b"guess", "number": 0, "rank": 0, "error": None, "result": None}),
    ),
    "reader": (reader, packed(Request(1, 0, 10))),
    "store": (
        store,
        packed(
            [1, "set", ["n"], b"9" * 4300],
            [2, "add", ["n"], b"", b"", 1],
            [3, "compare_set", ["n"], b"\xff", b"1"],
            [4, "get", []],
        ),
    ),
    "driver": (partial(driver, greets=False), packed(*REPLIES)),
    "driver, greeted": (partial(driver, greets=True), packed(*REPLIES)),
}
every_door = pytest.mark.parametrize("name", DOORS)


@every_door
def test_a_right_peer_is_served_after_nasty_bytes(name: str) -> None:
    begin, valid = DOORS[name]
    with begin() as door:
        for data in (*NASTY.values(), *valid):
            door.send(data)
        door.serve()


@every_door
@given(drawn=st.data())
def test_a_right_peer_is_served_after_any_bytes(name: str, drawn: st.DataObject) -> None:
    begin, valid = DOORS[name]
    messages = drawn.draw(st.lists(foreign(valid), min_size=1, max_size=8))
    with begin() as door:
        for data in messages:
            door.send(data)
        door.serve()


@contextmanager
def answering(*answers: bytes, came: Queue[FromNode] | None = None) -> Iterator[tuple[str, str]]:
    """Say `answers` to who dials, and put a node's messages into `came`. Yields endpoint and secret."""
    loop, secret, made = LoopThread(), "0" * 64, list[Listener]()

    async def begin() -> str:
        made.append(Listener(listen("127.0.0.1", None, "no test"), admit, 1 << 20))
        made[0].secrets.add(secret)
        return made[0].endpoint

    def admit(connection: Any, shown: str) -> Callable[[bytes], None]:
        for each in answers:
            connection.send(each)
        return lambda data: came.put(from_node(data)) if came else None

    yield loop.run_concurrently(begin()).result(WAIT_S), secret
    loop.run_concurrently(made[0].close()).result(WAIT_S)
    loop.close()


@pytest.mark.parametrize("nasty", NASTY)
def test_a_node_ends_if_the_driver_asks_in_no_words_of_ours(nasty: str) -> None:
    with answering(NASTY[nasty]) as (endpoint, secret), pytest.raises(WireError):
        asyncio.run(Node(NodeOffer(endpoint, secret), Process(), Numbered).serve())


@pytest.mark.parametrize("nasty", NASTY)
def test_a_node_says_that_arguments_are_none_and_answers_the_next_call(nasty: str) -> None:
    came: Queue[FromNode] = Queue()
    asks = [Ask(1, "resume", NASTY[nasty], 1e12), Ask(2, "resume", value_bytes((3,), tuple[int]), 1e12)]
    with answering(*packed(Welcome(0.0), *asks), came=came) as (endpoint, secret):
        serving = on_daemon(
            lambda: asyncio.run(Node(NodeOffer(endpoint, secret), Process(), Numbered).serve(again_s=0.01))
        )
        assert isinstance(came.get(timeout=WAIT_S), NodeHello)
        replies = [came.get(timeout=WAIT_S), came.get(timeout=WAIT_S)]  # in any order
        assert Answer(2, value_bytes(None, None)) in replies
        (refused,) = (each for each in replies if isinstance(each, Raised))
        assert refused.error
        assert isinstance(refused.error.rebuild(), WireError)
    with pytest.raises(TransportError):
        serving.result(WAIT_S)


@pytest.mark.parametrize("nasty", NASTY)
def test_a_rank_says_that_its_store_failed(nasty: str) -> None:
    with answering(NASTY[nasty]) as (endpoint, secret):
        rank = NetworkStore(f"{secret}@{endpoint.removeprefix('tcp://')}", WAIT_S)
        with closing(rank), pytest.raises(RuntimeError, match="the store at"):
            rank.check(["a"])


class Nasty(HandshakeServer):
    """Answers every request over ZeroMQ with `data`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        super().__init__("127.0.0.1", None, 1 << 20, "no test")

    def answer(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        return [self._data]


@pytest.mark.parametrize("nasty", NASTY)
def test_a_reader_names_the_peer_that_answers_in_no_words_of_ours(nasty: str) -> None:
    with closing(Nasty(NASTY[nasty])) as server, closing(SharedBuffer.create(100)) as target:
        memory = BufferHandle.unmapped(100)
        offer = Offer(
            holder="h1", protocol="zeromq", memory=memory, endpoint=server.endpoint, secret=server.secret
        )
        refused = pytest.raises(ReadError, match="h1 could not be read: not a message of ours")
        with closing(open_reader([target], {"h1": offer}, may_map=False)) as own, refused:
            own.read([Read("h1", 0, 0, 0, 100)], WAIT_S)


def test_what_no_rank_wrote_ends_no_roll_call() -> None:
    with closing(StoreServer("127.0.0.1")) as server, closing(NetworkStore(server.address, WAIT_S)) as rank:
        roll = RollCall(rank, 0, 2)
        for data in NASTY.values():
            for key in ("call", "left/1", "here/1"):
                rank.set(key, data)
            assert not roll.called()
            assert not roll.left()
