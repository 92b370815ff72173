"""Links and nodes over real sockets, with tasks and threads for processes."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from tests.cable import Cable
from tests.patience import patient
from weightsync.actors.ray.node_links import NodeLinks
from weightsync.actors.ray.publish_notices import HolderNode, PublishNotices, published, readable
from weightsync.actors.ray.publish_relay import PublishRelay
from weightsync.actors.ray.remote import answer
from weightsync.channel.wire import SentError
from weightsync.errors import (
    EngineError,
    PeerError,
    PeerLostError,
    SlowError,
    StateError,
    TransportError,
    WeightSyncError,
)
from weightsync.node.codec import encode
from weightsync.node.link import Link, Links
from weightsync.node.messages import Answer, Ask, Drop, Hello, NodeOffer, Notice, Tell, Welcome, to_node
from weightsync.node.node import Node, serve
from weightsync.protocol import listener
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.messages import (
    LoadReport,
    Moved,
    PublishReport,
    PublishTask,
    Read,
    Refilled,
    Snapshot,
)
from weightsync.protocol.peers import EnginePeer, HolderPeer, TrainerPeer
from weightsync.protocol.stream import Stream, framed
from weightsync.protocol.timing import Span, within

REPORT = LoadReport(np.arange(6, dtype=np.uint64).reshape(2, 3), ((Span("load", 1.0, 2.0),), ()))
SLOW = SlowError("reading of bucket 3", ("engine e0",), 2.0)
WORDS = np.array([1, 1 << 63, (1 << 64) - 1], np.uint64)


class Numbered(Protocol):
    """What most nodes here answer."""

    async def add(self, number: int, more: int = 10) -> int: ...
    async def wait(self, number: int) -> int: ...


class Adder:
    """Answers `add` at once, and `wait` when the test says so.

    Attributes:
        asked: the numbers of all calls that began.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.may_answer: dict[int, asyncio.Event] = {}

    async def add(self, number: int, more: int) -> int:
        self.asked.append(number)
        return number + more

    async def wait(self, number: int) -> int:
        self.asked.append(number)
        await self.may_answer.setdefault(number, asyncio.Event()).wait()
        return number


class Process:
    """A node that is a task of the test.

    Attributes:
        serving: ends as `Node.serve`.
    """

    def __init__(
        self, links: Links, peer: object, protocol: type = Numbered, name: str = "engine e0"
    ) -> None:
        self.link = Link(name, protocol)
        self.offer = links.offer(self.link)
        self.peer, self.protocol = peer, protocol

    def dial(self, endpoint: str = "", **limits: float) -> Process:
        """Begin to serve, at `endpoint` if there is a cable."""
        offer = msgspec.structs.replace(self.offer, endpoint=endpoint or self.offer.endpoint)
        self.node = Node(offer, self.peer, self.protocol)
        self.serving = asyncio.ensure_future(self.node.serve(**limits))
        return self

    async def call(self, method: str, *args: object) -> Any:
        return await asyncio.wait_for(self.link.call(method, *args), patient(10))

    def begin(self, method: str, *args: object) -> asyncio.Future[Any]:
        """Call, and return once the call has been sent."""
        return asyncio.ensure_future(self.call(method, *args))


def run(test: Callable[[Links], Awaitable[None]]) -> None:
    async def whole() -> None:
        links = Links("127.0.0.1")
        try:
            await test(links)
        finally:
            await links.close()

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(patient(10)):
        while not condition():
            await asyncio.sleep(0.005)


async def ended(process: Process) -> None:
    """Wait until the node's `serve` returns."""
    await asyncio.wait_for(process.serving, patient(10))


@asynccontextmanager
async def cabled(links: Links, peer: object) -> Any:
    """A process that dials through a cable."""
    process = Process(links, peer)
    async with Cable(process.offer.endpoint) as cable:
        yield process.dial(cable.endpoint), cable


def offer(number: int) -> Offer:
    memory = BufferHandle(1, 2, f"part-{number}", 64)
    return Offer(
        holder=f"holder {number}", protocol="zeromq", memory=memory, endpoint="tcp://h:1", secret="s"
    )


class Noting:
    """A peer that notes arguments, and gives the answer that a test says."""

    def __init__(self, **answers: object) -> None:
        self.asked: list[tuple[object, ...]] = []
        self._answers = answers

    def __getattr__(self, method: str) -> Callable[..., Awaitable[object]]:
        async def call(*args: object) -> object:
            self.asked.append((method, *args))
            said = self._answers[method]
            if isinstance(said, Exception):
                raise said
            return said

        return call


def test_arguments_and_answers_arrive_as_they_were() -> None:
    async def test(links: Links) -> None:
        holder = Noting(move=Moved(Span("move", 1.5, 0.25), 0.5, SLOW))
        engine = Noting(load=REPORT, pause=None)
        first, second = Process(links, holder, HolderPeer).dial(), Process(links, engine, EnginePeer).dial()
        task = Read(cast=frozenset({3, 4}))
        moved = await first.call("move", 7, task, 2.5)
        assert holder.asked == [("move", 7, task, 2.5)]
        assert (moved.span, moved.waited_s) == (Span("move", 1.5, 0.25), 0.5)
        assert (type(moved.slow), str(moved.slow)) == (SlowError, str(SLOW))
        loaded = await second.call("load", 7, 2.5)
        assert np.array_equal(loaded.fingerprints, REPORT.fingerprints)
        assert loaded.spans == REPORT.spans
        assert await second.link.pause("keep", 2.5) is None
        assert engine.asked == [("load", 7, 2.5), ("pause", "keep", 2.5)]

    run(test)


def test_what_a_host_is_asked_and_says_arrives_as_it_was() -> None:
    words = np.arange(3, dtype=np.uint64)
    report = PublishReport(words, words, {"w": 1}, [Span("publish", 1.5, 0.25)])
    lost = SentError.of(PeerLostError("trainer 4", "killed"))

    async def test(links: Links) -> None:
        peer = Noting(publish_all=({2: report}, {4: lost}))
        process = Process(links, peer, HolderNode).dial()
        task = PublishTask(count=True)
        reports, errors = await process.call("publish_all", task, (7, 9), 2.5)
        assert peer.asked == [("publish_all", task, (7, 9), 2.5)]
        assert (reports[2].nonfinite, [*reports[2].fingerprint]) == ({"w": 1}, [0, 1, 2])
        assert isinstance(error := errors[4].rebuild(), PeerLostError)
        assert error.peer == "trainer 4"

    run(test)


def test_what_a_refill_reads_and_has_read_arrives_as_it_was() -> None:
    refilled = Refilled({"holder 0": 64}, {"holder 0": "memory"}, 0.5)
    small = Snapshot(3, "layout", {0: (offer(0), offer(1))}, reserve={0: (offer(2),)}, on_device=True)
    large = Snapshot(3, "layout", {part: (offer(part),) for part in range(10_000)})

    async def test(links: Links) -> None:
        peer = Noting(refill=refilled)
        process = Process(links, peer, HolderPeer).dial()
        for snapshot in (small, large):
            assert await process.call("refill", 7, snapshot, True, 2.5, 10.0) == refilled
            assert peer.asked.pop() == ("refill", 7, snapshot, True, 2.5, 10.0)

    run(test)


def test_arguments_with_defaults_may_be_left_out_and_others_may_not() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        assert await process.call("add", 3) == 13
        assert await process.call("add", 3, 4) == 7
        with pytest.raises(TypeError, match="0 arguments in place of 2"):
            await process.call("add")
        with pytest.raises(AttributeError):
            _ = process.link.subtract

    run(test)


def test_a_call_that_tells_resolves_its_future_before_it_answers() -> None:
    report = PublishReport(WORDS, WORDS, {"a": 2}, (Span("publish", 1.0, 2.0),))

    class Trainer:
        async def publish(self, task: PublishTask, may_read: asyncio.Future[None]) -> PublishReport:
            may_read.set_result(None)
            await may_answer.wait()
            return report

    async def test(links: Links) -> None:
        process = Process(links, Trainer(), TrainerPeer).dial()
        may_read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        publishing = process.begin("publish", PublishTask(count=True), may_read)
        await asyncio.wait_for(may_read, patient(10))
        assert not publishing.done()
        may_answer.set()
        assert (await publishing).nonfinite == {"a": 2}

    may_answer = asyncio.Event()
    run(test)


def test_errors_of_ours_come_back_and_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test(links: Links) -> None:
        peer = Noting(load=EngineError("e0", "move", "no memory", 1), resume=ZeroDivisionError("by zero"))
        process = Process(links, peer, EnginePeer).dial()
        with pytest.raises(EngineError, match="no memory") as raised:
            await process.call("load", 7, 2.5)
        assert raised.value.rank == 1
        with pytest.raises(PeerError, match=r"engine e0.*ZeroDivisionError: by zero"):
            await process.call("resume", 3)

    run(test)
    assert "ZeroDivisionError" in caplog.text, "the process logs where it came from"


def test_an_answer_of_another_type_is_the_processs_error() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Noting(add=3, wait="late")).dial()
        with pytest.raises(PeerError, match=r"engine e0.*not a value of ours"):
            await process.call("wait", 7)
        assert await process.call("add", 1, 2) == 3, "the driver still listens"

    run(test)


def test_many_calls_are_answered_in_any_order() -> None:
    async def test(links: Links) -> None:
        process = Process(links, peer := Adder()).dial()
        calls = [process.begin("wait", number) for number in range(200)]
        await until(lambda: len(peer.asked) == len(calls))
        assert sorted(peer.asked) == [*range(200)]
        assert await process.call("add", 3) == 13, "none holds up another"
        for number in reversed(range(200)):
            peer.may_answer[number].set()
            if number % 50 == 0:
                await calls[number]
                assert not any(each.done() for each in calls[:number])
        assert await asyncio.gather(*calls) == [*range(200)]

    run(test)


def test_an_object_in_threads_may_hang_in_one_call_and_answers_others() -> None:
    may_end = threading.Event()

    class Slow:
        def wait(self, number: int) -> int:
            assert may_end.wait(patient(10))
            return number

        def add(self, number: int, more: int) -> int:
            return number + more

    async def test(links: Links) -> None:
        process = Process(links, Slow())
        node = serve(process.offer, Slow(), Numbered)
        await asyncio.wait_for(asyncio.wrap_future(node.welcomed), patient(10))
        hanging = process.begin("wait", 5)
        assert await process.call("add", 3) == 13
        assert not hanging.done()
        may_end.set()
        assert await hanging == 5

    run(test)


def test_a_call_that_was_given_up_is_not_carried_out_if_it_has_not_begun() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Busy(Adder):
        async def wait(self, number: int) -> int:
            begun.set()
            assert may_end.wait(patient(10)), "its loop is held up meanwhile"
            return number

    async def test(links: Links) -> None:
        process = Process(links, peer := Busy())
        serve(process.offer, peer, Numbered)
        busy = process.begin("wait", 1)
        await until(begun.is_set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.link.call("add", 2), 0.05)
        last = process.begin("add", 3)
        await asyncio.sleep(0.05)
        may_end.set()
        assert (await busy, await last) == (1, 13)
        assert peer.asked == [3]

    run(test)


def test_a_call_that_was_given_up_is_cancelled_if_it_has_begun() -> None:
    async def test(links: Links) -> None:
        process = Process(links, peer := Adder()).dial()
        waiting = process.begin("wait", 1)
        await until(lambda: peer.asked)
        waiting.cancel()
        assert await process.call("add", 2) == 12
        peer.may_answer[1].set()
        assert await process.call("add", 3) == 13

    run(test)


def test_a_call_that_was_given_up_while_the_connection_was_lost_is_cancelled() -> None:
    """Else it goes on, and may change what later calls have made."""
    cancelled = list[int]()

    class Noting(Adder):
        async def wait(self, number: int) -> int:
            try:
                return await super().wait(number)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

    async def test(links: Links) -> None:
        async with cabled(links, peer := Noting()) as (process, cable):
            waiting = process.begin("wait", 1)
            await until(lambda: peer.asked)
            cable.hold()
            waiting.cancel()
            await cable.holds_some()
            await cable.cut()
            await until(lambda: cancelled == [1])
            assert await process.call("add", 2) == 12

    run(test)


def test_a_call_is_not_carried_out_after_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """As after a link was down: another engine may have taken its part by then."""

    async def test(links: Links) -> None:
        async with cabled(links, peer := Adder()) as (process, cable):
            await process.call("add", 2)
            cable.hold()
            with within(0.1):
                late = process.begin("add", 3)
            await asyncio.sleep(0.2)
            cable.let_go()
            with within(patient(10)):
                in_time = process.begin("add", 4)
            assert await in_time == 14
            await until(lambda: "add() came after its deadline, and is not carried out" in caplog.text)
            assert peer.asked == [2, 4]
            late.cancel()

    run(test)


def test_a_connection_that_was_cut_comes_back_with_the_answers() -> None:
    async def test(links: Links) -> None:
        async with cabled(links, peer := Adder()) as (process, cable):
            for number in range(3):
                waiting = process.begin("wait", number)
                await until(partial(peer.asked.__contains__, number))
                await cable.cut()
                await until(partial(cable.has_dials, number + 2))
                peer.may_answer[number].set()
                assert await waiting == number
            assert await process.call("add", 3) == 13
            assert peer.asked == [0, 1, 2, 3], "none was carried out twice"

    run(test)


@pytest.mark.parametrize("lost", ["the call", "the answer"])
def test_a_call_that_was_lost_with_the_connection_raises(lost: str) -> None:
    async def test(links: Links) -> None:
        async with cabled(links, peer := Adder()) as (process, cable):
            if lost == "the call":
                await process.call("add", 1)
                cable.hold()
                call = process.begin("add", 2)
            else:
                call = process.begin("wait", 2)
                await until(lambda: 2 in peer.asked)
                cable.hold()
                peer.may_answer[2].set()
            await cable.holds_some()
            await cable.cut()
            with pytest.raises(PeerError, match=r"engine e0.*lost, and the call or its answer"):
                await call
            assert await process.call("add", 3) == 13

    run(test)


def test_a_call_waits_for_a_node_that_has_not_dialled() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder())
        early = process.begin("add", 3)
        await asyncio.sleep(0.02)
        assert not process.link.is_dialled
        process.dial()
        assert await early == 13

    run(test)


def test_a_second_process_is_refused_and_told_why(caplog: pytest.LogCaptureFixture) -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        assert await process.call("add", 3) == 13
        second = Node(process.offer, peer := Adder(), Numbered)
        with pytest.raises(StateError, match="refuses this process: another process has this place"):
            await asyncio.wait_for(second.serve(), patient(10))
        with pytest.raises(StateError, match="another process"):
            second.welcomed.result(0)
        assert await process.call("add", 3) == 13
        assert not peer.asked

    run(test)
    assert "[engine e0] a process that dials in its place is refused" in caplog.text


@pytest.mark.parametrize("other", ["with its own secret", "before a hello"])
def test_a_process_does_not_speak_for_another(other: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(links: Links) -> None:
        process, own = Process(links, peer := Adder()).dial(), Process(links, Adder(), name="engine e1")
        waiting = process.begin("wait", 1)
        await until(lambda: peer.asked)
        offer = own.offer if other == "with its own secret" else process.offer
        with closing(dialled(offer)) as stranger:
            stranger.send(msgspec.msgpack.encode(Answer(1, encode(99, int))))
            await until(partial(is_lost, stranger))
        assert not waiting.done()
        peer.may_answer[1].set()
        assert await waiting == 1

    run(test)
    assert "sent an answer before its hello" in caplog.text


@pytest.mark.parametrize("kind", [PeerLostError, PeerError])
def test_a_link_that_ends_ends_its_calls_and_its_node(kind: type[WeightSyncError]) -> None:
    async def test(links: Links) -> None:
        process = Process(links, peer := Adder()).dial()
        waiting = process.begin("wait", 1)
        await until(lambda: peer.asked)
        process.link.end(kind("engine e0", "killed"))
        process.link.end(PeerError("engine e0", "a later reason"))
        for call in (waiting, process.begin("add", 2)):
            with pytest.raises(kind, match="killed"):
                await call
        await ended(process)
        again = Node(process.offer, peer, Numbered)
        with pytest.raises(StateError, match=r"refuses this process: it is taken for dead.*killed"):
            await asyncio.wait_for(again.serve(), patient(10))
        assert peer.asked == [1]
        new = Process(links, peer).dial()
        assert await new.call("add", 3) == 13, "the same peer can have a new link"

    run(test)


def test_a_link_that_ends_before_its_node_dialled_ends_calls_that_wait() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder())
        waiting = process.begin("add", 1)
        await asyncio.sleep(0)
        process.link.end(PeerLostError("engine e0", "killed"))
        with pytest.raises(PeerLostError, match="killed"):
            await waiting

    run(test)


def test_a_driver_that_closes_ends_all_nodes_and_calls() -> None:
    async def test(_: Links) -> None:
        links = Links("127.0.0.1")
        processes = [Process(links, Adder()).dial() for _ in range(3)]
        waiting = [each.begin("wait", 1) for each in processes]
        await until(lambda: all(each.peer.asked for each in processes))  # type: ignore[attr-defined]
        await links.close()
        for each in waiting:
            with pytest.raises(PeerError, match="the driver has closed"):
                await each
        for process in processes:
            await ended(process)

    run(test)


def test_a_node_that_does_not_come_back_is_lost() -> None:
    async def test(links: Links) -> None:
        link = Link("holder 3", Numbered, patient(0.25))
        process = Process(links, peer := Adder())
        process.link, process.offer = link, links.offer(link)
        async with Cable(process.offer.endpoint) as cable:
            process.dial(cable.endpoint)
            assert await process.call("add", 1) == 11
            await cable.cut()
            await until(lambda: cable.has_dials(2))
            assert await process.call("add", 2) == 12, "it came back in time"
            waiting = process.begin("wait", 3)
            await until(lambda: 3 in peer.asked)
            await asyncio.sleep(patient(0.3))
            assert not waiting.done(), "nobody takes it for lost any more"
            process.serving.cancel()
            with pytest.raises(PeerLostError, match=r"holder 3.*hung up, and does not dial again"):
                await waiting
            with pytest.raises(PeerLostError, match="holder 3"):
                await process.call("add", 4)

    run(test)


def test_a_hello_that_was_recorded_takes_nobodys_place() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder())
        async with Cable(process.offer.endpoint) as cable:
            process.dial(cable.endpoint)
            assert await process.call("add", 1) == 11
            host, port = process.offer.endpoint.removeprefix("tcp://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(cable.recorded))
            assert await asyncio.wait_for(reader.read(), patient(2)) == b"", "the driver hangs up"
            writer.close()
            assert await process.call("add", 2) == 12
            assert not cable.has_dials(2), "the process has kept its connection"

    run(test)


def dialled(offer: NodeOffer, secret: str = "") -> Stream:
    """Connect as a process that is not a node."""
    return Stream(offer.endpoint, secret or offer.secret, 1 << 20, patient(10))


def is_lost(stream: Stream) -> bool:
    """Return True if the driver has hung up."""
    try:
        stream.receive(0)
    except OSError:
        return True
    return False


STRANGERS = {
    "a wrong secret": framed(b"0" * 64),
    "a short secret": framed(b""),
    "garbage": b"\xde\xad\xbe\xef" * 100,
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a length": b"\0\0",
    "half a secret": framed(b"0" * 64)[:30],
    "a huge length": b"\xff\xff\xff\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_disconnected(stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)

    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        assert await process.call("add", 3) == 13
        where = process.offer.endpoint.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(where[0], int(where[2]))
        writer.write(STRANGERS[stranger])
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), patient(5)) == b""
        writer.close()
        assert await process.call("add", 3) == 13

    run(test)


@contextmanager
def many_descriptors(wanted: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_strangers_disturb_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 1.0)

    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        assert await process.call("add", 3) == 13
        host, _, port = process.offer.endpoint.removeprefix("tcp://").rpartition(":")
        with ExitStack() as strangers:
            idle = []
            for _ in range(1000):
                each = strangers.enter_context(socket.socket())
                each.setblocking(False)
                await asyncio.get_running_loop().sock_connect(each, (host, int(port)))
                idle.append(each)
            began = time.monotonic()
            assert await process.call("add", 3) == 13
            assert time.monotonic() - began < patient(0.25)
            for each in idle:
                with suppress(ConnectionError):
                    end = asyncio.get_running_loop().sock_recv(each, 1)
                    assert await asyncio.wait_for(end, patient(5)) == b""
            assert await process.call("add", 3) == 13

    with many_descriptors(4096):
        run(test)


GARBAGE = {
    "no message": b"garbage",
    "nothing": b"",
    "a driver's message": msgspec.msgpack.encode(Ask(1, "add", b"", 1.0)),
    "a notice before the hello": msgspec.msgpack.encode(Notice(1)),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_after_the_right_secret_ends_that_connection_alone(
    garbage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(links: Links) -> None:
        process, other = Process(links, Adder()).dial(), Process(links, Adder())
        assert await process.call("add", 3) == 13
        with closing(dialled(other.offer)) as friend:
            friend.send(GARBAGE[garbage])
            await until(partial(is_lost, friend))
        assert await process.call("add", 3) == 13
        other.dial()
        assert await other.call("add", 3) == 13, "its place is free"

    with caplog.at_level(logging.WARNING, "weightsync.protocol"):
        run(test)
    assert caplog.text.count("a process is disconnected") == 1


async def greeted(process: Process) -> Stream:
    """Dial and say hello as a node, which the test speaks for."""
    friend = await asyncio.to_thread(dialled, process.offer)
    friend.send(msgspec.msgpack.encode(Hello("own", frozenset())))
    assert isinstance(await received(friend), Welcome)
    return friend


async def received(friend: Stream) -> object:
    message = await asyncio.to_thread(friend.receive, patient(10))
    assert message is not None
    return to_node(message)


def test_answers_that_nobody_waits_for_are_ignored() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder())
        with closing(await greeted(process)) as friend:
            for message in (Answer(99, b"\xc1"), Tell(99), Tell(1), Notice(5, b"\xc1")):
                friend.send(msgspec.msgpack.encode(message))
            call = process.begin("add", 3)
            ask = await received(friend)
            assert isinstance(ask, Ask)
            for value in (13, 14):
                friend.send(msgspec.msgpack.encode(Answer(ask.ticket, encode(value, int))))
            assert await call == 13
            given_up = process.begin("add", 4)
            ask = await received(friend)
            assert isinstance(ask, Ask)
            given_up.cancel()
            assert await received(friend) == Drop(ask.ticket)
            friend.send(msgspec.msgpack.encode(Answer(ask.ticket, encode(14, int))))
            last = process.begin("add", 5)
            ask = await received(friend)
            assert isinstance(ask, Ask)
            friend.send(msgspec.msgpack.encode(Answer(ask.ticket, b"\xc1")))
            with pytest.raises(PeerError, match="engine e0"):
                await last
            assert process.link.is_dialled

    run(test)


@asynccontextmanager
async def driver(*messages: object) -> Any:
    """Be a driver that says these messages, and hangs up at once if there are none.

    Yields the offer, and a list with the writer of each connection.
    """
    writers: list[asyncio.StreamWriter] = []

    def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        for message in messages:
            writer.write(framed(msgspec.msgpack.encode(message)))
        if not messages:
            writer.close()

    async with await asyncio.start_server(say, "127.0.0.1") as server:
        yield NodeOffer(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", "0" * 64), writers
        for writer in writers:
            writer.close()


class Subtracting(Protocol):
    """Another protocol than the node's."""

    async def subtract(self, number: int) -> int: ...


def test_a_method_that_is_none_is_not_called() -> None:
    async def test(links: Links) -> None:
        process = Process(links, peer := Adder(), Subtracting)
        process.protocol = Numbered
        process.dial()
        with pytest.raises(PeerError, match=r"engine e0.*'subtract' is no method that can be called here"):
            await process.call("subtract", 3)
        assert not peer.asked
        assert not process.serving.done()

    run(test)


def test_a_node_whose_driver_does_not_answer_raises() -> None:
    async def test(links: Links) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        node = Node(NodeOffer(f"tcp://127.0.0.1:{port}", "0" * 64), Adder(), Numbered)
        began = time.monotonic()
        with pytest.raises(TransportError, match=rf"does not answer at tcp://127.0.0.1:{port}.*sync.ports"):
            await node.serve(0.3)
        assert 0.25 < time.monotonic() - began < patient(2)
        with pytest.raises(TransportError, match="does not answer"):
            node.welcomed.result(0)

    run(test)


def test_a_node_whose_driver_hangs_raises() -> None:
    async def test(links: Links) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(TransportError, match="does not answer"):
                await Node(NodeOffer(endpoint, "0" * 64), Adder(), Numbered).serve(0.3)

    run(test)


def test_a_node_that_nobody_knows_gives_up_and_does_not_storm() -> None:
    """As that of an ended driver, whose port another driver has."""

    async def test(links: Links) -> None:
        async with driver() as (offer, dials):
            with pytest.raises(TransportError, match="does not answer"):
                await asyncio.wait_for(Node(offer, Adder(), Numbered).serve(0.5), patient(2))
            assert 0 < len(dials) < 10

    run(test)


def test_a_node_whose_driver_is_gone_raises_after_a_while() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder())
        async with Cable(process.offer.endpoint) as cable:
            process.dial(cable.endpoint, again_s=0.3)
            assert await process.call("add", 3) == 13
            began = time.monotonic()
        with pytest.raises(TransportError, match="does not answer"):
            await ended(process)
        assert 0.25 < time.monotonic() - began < patient(2)

    run(test)


def expect(process: Process) -> PublishNotices:
    notices = PublishNotices(asyncio.get_running_loop().create_future())
    process.link.when_noticed = notices.came
    return notices


def test_a_notice_resolves_the_publish_of_its_ticket_alone() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        await process.link.dialled()
        old = expect(process)
        for _ in range(2):
            now = expect(process)
            process.node.notify(readable(old.ticket))
            await asyncio.to_thread(process.node.notify, readable(now.ticket))
            await asyncio.wait_for(now.readable, patient(10))
            process.node.notify(readable(now.ticket))  # repeated: nobody waits for it
            assert not old.readable.done()

    run(test)


def test_a_report_comes_whole_and_one_of_an_earlier_publish_does_not_count() -> None:
    async def test(links: Links) -> None:
        process = Process(links, Adder()).dial()
        await process.link.dialled()
        old, now = expect(process), expect(process)
        span = Span("publish", 1.8e9, 0.25)
        counts = {f"model.layers.{i}.weight": 1 for i in range(60_000)}
        sent = PublishReport(WORDS, WORDS[::-1].copy(), counts, (span,), WORDS + 1)
        for number in (old.ticket, now.ticket, now.ticket):  # the last one is repeated: nobody waits for it
            await asyncio.to_thread(process.node.notify, published(number, sent))
        report = await asyncio.wait_for(now.report, patient(10))
        assert not old.report.done()
        assert (report.fingerprint == sent.fingerprint).all()
        assert (report.frozen == sent.frozen).all()
        assert (report.agreement == sent.agreement).all()
        assert (report.nonfinite, report.spans) == (counts, sent.spans)
        assert await process.call("add", 3) == 13

    run(test)


def test_a_report_that_is_none_is_refused_and_the_next_one_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def test(links: Links) -> None:
        process, other = Process(links, peer := Adder()).dial(), Process(links, Adder()).dial()
        waiting, others = process.begin("wait", 1), other.begin("wait", 1)
        await until(lambda: peer.asked)
        now = expect(process)
        process.node.notify(Notice(now.ticket, b"none"))
        await until(lambda: "not a value of ours" in caplog.text)
        await asyncio.sleep(0)
        await asyncio.wait_for(process.link.dialled(), patient(10))
        process.node.notify(published(now.ticket, PublishReport(WORDS, WORDS, {}, ())))
        assert not (await asyncio.wait_for(now.report, patient(10))).nonfinite
        assert other.link.is_dialled
        peer.may_answer[1].set()
        assert await waiting == 1
        assert await other.call("add", 3) == 13
        others.cancel()

    run(test)
    assert "a process is disconnected: not a value of ours" in caplog.text


def test_nobody_to_tell_is_no_error() -> None:
    async def test(_: Links) -> None:
        process = Process(links := Links("127.0.0.1"), Adder())
        Node(process.offer, Adder(), Numbered).notify(readable(1))
        process.dial()
        process.node.notify(readable(1))
        await process.link.dialled()
        await links.close()
        process.node.notify(readable(2))
        await ended(process)
        process.node.notify(readable(3))

    run(test)


def test_a_node_that_nobody_ended_does_not_hold_up_an_exit() -> None:
    """As that of an actor whose driver is gone."""
    code = """
from weightsync.node.messages import NodeOffer
from weightsync.node.node import serve
from weightsync.actors.ray.publish_notices import TrainerNode, readable
node = serve(NodeOffer("tcp://127.0.0.1:1", "0" * 64), object(), TrainerNode)
node.notify(readable(1))
"""
    subprocess.run([sys.executable, "-c", code], timeout=patient(30), check=True)


class Served:
    """A stand-in for an actor: its node is a task, if it starts."""

    name = "engine e0"
    protocol: type = Numbered
    node: Link | None = None

    def __init__(self, key: object = "e0", error: WeightSyncError | None = None) -> None:
        self.key, self._error = cast("Any", key), error
        self.offers: list[NodeOffer] = []

    async def serve_node(self, offer: NodeOffer) -> None:
        self.offers.append(offer)
        if self._error:
            raise self._error
        node = Node(offer, Adder(), Numbered)
        self.serving = asyncio.ensure_future(node.serve())
        await asyncio.wrap_future(node.welcomed)


def run_served(test: Callable[[NodeLinks], Awaitable[None]]) -> None:
    async def whole() -> None:
        links = NodeLinks(None)
        try:
            await test(links)
        finally:
            await links.close()

    asyncio.run(whole())


def test_an_actor_is_started_once_however_often_it_is_connected() -> None:
    async def test(links: NodeLinks) -> None:
        links.open(actor := Served())
        links.open(again := Served())
        assert again.node is actor.node
        assert actor.node
        assert await asyncio.wait_for(actor.node.add(3), patient(10)) == 13
        assert (len(actor.offers), len(again.offers)) == (1, 0)
        links.end("e0", PeerError("engine e0", "it was replaced"))
        with pytest.raises(PeerError, match="it was replaced"):
            await actor.node.add(3)
        await asyncio.wait_for(actor.serving, patient(10))
        links.open(again)
        assert again.node
        assert await asyncio.wait_for(again.node.add(3), patient(10)) == 13

    run_served(test)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (PeerLostError("engine e0", "killed"), PeerLostError("engine e0", "killed")),
        (
            TransportError("the driver does not answer"),
            PeerError("engine e0", "its node does not start: the driver does not answer"),
        ),
    ],
)
def test_calls_of_a_node_that_does_not_start_say_why(raised: WeightSyncError, told: WeightSyncError) -> None:
    async def test(links: NodeLinks) -> None:
        links.open(actor := Served(error=raised))
        assert actor.node
        with pytest.raises(type(told)) as caught:
            await asyncio.wait_for(actor.node.add(3), patient(10))
        assert caught.value.args == told.args

    run_served(test)


def test_a_publishing_relay_without_a_connection_asks_nobody() -> None:
    async def test(links: Links) -> None:
        async def told(_: object) -> None: ...

        holder = SimpleNamespace(name="holder 0", node=None, relay=told)
        relay = PublishRelay(cast("Any", holder), {})
        await asyncio.sleep(0.01)
        for node in (None, Link("holder 0", HolderNode)):
            holder.node = node
            with pytest.raises(PeerError, match=r"trainers through holder 0.*no connection"):
                await relay.publish(PublishTask(count=True), [], 4.0)

    run(test)


def test_an_actor_that_ray_cannot_reach_is_not_taken_for_dead() -> None:
    async def unreachable() -> None:
        raise ActorUnavailableError("the connection timed out", None)

    with pytest.raises(PeerError, match=r"engine e0.*cannot be reached"):
        asyncio.run(answer("engine e0", unreachable()))


def test_an_offer_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(NodeOffer("tcp://127.0.0.1:1", "s3cret"))
