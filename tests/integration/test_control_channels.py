"""Control channels over real sockets, with threads for processes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from tests.patience import patient
from weightsync.actors.ray.control_channels import Callee, ControlChannel, ControlChannels
from weightsync.actors.ray.remote import answer, remote_engine
from weightsync.actors.relays.publish_relay import PublishRelay
from weightsync.channel.control import Answer, ControlOffer, HostMoved, Readable, Turns, answer_calls, pack
from weightsync.channel.wire import SentError
from weightsync.errors import (
    EngineError,
    PeerError,
    PeerLostError,
    SlowError,
    WeightSyncError,
    WireError,
)
from weightsync.protocol import listener
from weightsync.protocol.daemon import on_daemon
from weightsync.protocol.handles import BufferHandle, Offer
from weightsync.protocol.messages import LoadReport, Moved, PublishTask, Refilled, Snapshot, UpdateTask
from weightsync.protocol.stream import Stream, framed
from weightsync.protocol.timing import Span

REPORT = LoadReport(np.arange(6, dtype=np.uint64).reshape(2, 3), ((Span("load", 1.0, 2.0),), ()))
SLOW = SlowError("reading of bucket 3", ("engine e0",), 2.0)


class Process:
    """A stand-in for a process: its methods run in a thread of this one."""

    name = "engine e0"
    channel: ControlChannel | None = None

    def __init__(self, methods: Mapping[str, Callable[..., object]], dials: bool = True) -> None:
        self.key: Any = object()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.offers: list[ControlOffer] = []
        self._methods, self._dials = methods, dials

    def answers(self, method: str) -> bool:
        return method == "answer_calls"

    async def answer_calls(self, offer: ControlOffer) -> None:
        self.offers.append(offer)
        if self._dials:
            served = asyncio.wrap_future(on_daemon(lambda: answer_calls(offer, self._methods)))
            await asyncio.wait([served, self.lost], return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            self.lost.result()
        if not self._dials:
            await self.lost

    async def call(self, method: str, *args: object) -> Any:
        assert self.channel is not None
        called = self.channel.call(method, args)
        assert called is not None, "it would go through Ray"
        return await asyncio.wait_for(called, patient(10))


async def opened(channels: ControlChannels, process: Process) -> Process:
    channels.open(process)
    await dialled(process)
    return process


async def dialled(callee: Callee) -> None:
    async with asyncio.timeout(patient(10)):
        while not (callee.channel and callee.channel.is_open):
            await asyncio.sleep(0.01)


def run(test: Callable[[ControlChannels], Any]) -> None:
    async def whole() -> None:
        channels = ControlChannels(None)
        try:
            await test(channels)
        finally:
            await channels.close()

    asyncio.run(whole())


def test_arguments_and_answers_arrive_as_they_were() -> None:
    asked: list[tuple[object, ...]] = []

    def move(*args: object) -> Moved:
        asked.append(args)
        return Moved(Span("move", 1.5, 0.25), 0.5, SLOW)

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"move": move, "load": lambda *_: REPORT, "pause": print}))
        task = UpdateTask(copies_directly=True, cast=frozenset({3, 4}))
        moved = await process.call("move", 7, True, task, 2.5)
        assert asked == [(7, True, task, 2.5)]
        assert (moved.span, moved.waited_s) == (Span("move", 1.5, 0.25), 0.5)
        assert (type(moved.slow), str(moved.slow)) == (SlowError, str(SLOW))
        loaded = await process.call("load", 7, 2.5)
        assert np.array_equal(loaded.fingerprints, REPORT.fingerprints)
        assert [tuple(each) for each in loaded.spans] == [tuple(each) for each in REPORT.spans]
        assert await process.call("pause", "keep", 2.5) is None

    run(test)


def test_what_a_host_is_asked_and_says_arrives_as_it_was() -> None:
    asked: list[tuple[object, ...]] = []
    lost = SentError.of(PeerLostError("holder 4", "killed"))

    def move_all(*args: object) -> HostMoved:
        asked.append(args)
        return {2: Moved(Span("move", 1.5, 0.25), 0.5, SLOW)}, {4: lost}, (6,)

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"move_all": move_all, "moved": lambda: ({}, {}, ())}))
        tasks = ((True, UpdateTask(cast=frozenset({3})), (2, 4)), (False, UpdateTask(), (6,)))
        moved, errors, uncalled = await process.call("move_all", 7, tasks, 2.5)
        assert asked == [(7, tasks, 2.5)]
        assert (moved[2].waited_s, str(moved[2].slow), uncalled) == (0.5, str(SLOW), (6,))
        assert isinstance(error := errors[4].rebuild(), PeerLostError)
        assert error.peer == "holder 4"
        assert await process.call("moved") == ({}, {}, ())

    run(test)


def offer(number: int) -> Offer:
    memory = BufferHandle(1, 2, f"part-{number}", 64)
    return Offer(
        holder=f"holder {number}", protocol="zeromq", memory=memory, endpoint="tcp://h:1", secret="s"
    )


def test_what_a_refill_reads_and_has_read_arrives_as_it_was() -> None:
    asked: list[tuple[object, ...]] = []
    snapshot = Snapshot(3, "layout", {0: [offer(0), offer(1)]}, reserve={0: [offer(2)]}, on_device=True)
    refilled = Refilled({"holder 0": 64}, {"holder 0": "memory"}, 0.5)

    def refill(*args: object) -> Refilled:
        asked.append(args)
        return refilled

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"refill": refill}))
        assert await process.call("refill", 7, snapshot, True, 2.5, 10.0) == refilled
        assert asked == [(7, snapshot, True, 2.5, 10.0)]
        assert process.channel
        large = Snapshot(3, "layout", {part: (offer(part),) for part in range(10_000)})
        assert process.channel.call("refill", (8, large, True, 2.5, 10.0)) is None, (
            "Ray carries what is large"
        )
        assert await process.call("refill", 9, snapshot, False, 2.5, 10.0) == refilled

    run(test)


def test_errors_of_ours_come_back_and_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def ours(*_: object) -> None:
        raise EngineError("e0", "move", "no memory", 1)

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"load": ours, "resume": lambda version: 1 // 0}))
        with pytest.raises(EngineError, match="no memory") as raised:
            await process.call("load", 7, 2.5)
        assert raised.value.rank == 1
        with pytest.raises(PeerError, match=r"engine e0.*ZeroDivisionError"):
            await process.call("resume", 3)

    run(test)
    assert "ZeroDivisionError" in caplog.text, "the process logs where it came from"


def test_calls_go_through_ray_before_it_dials_while_it_is_busy_and_if_they_are_others() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def load(*_: object) -> LoadReport:
        begun.set()
        assert may_end.wait(patient(10))
        return REPORT

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"load": load, "resume": lambda version: None}))
        assert process.channel
        given_up = process.channel.call("load", (7, 2.5))
        assert given_up is not None
        await asyncio.to_thread(begun.wait, patient(10))
        asyncio.ensure_future(given_up).cancel()
        assert process.channel.call("resume", (3,)) is None, "load has not been answered"
        assert process.channel.call("layout", ()) is None
        may_end.set()
        async with asyncio.timeout(patient(10)):
            while (answer := process.channel.call("resume", (3,))) is None:
                await asyncio.sleep(0.01)
        assert await answer is None
        silent = Process({}, dials=False)
        channels.open(silent)
        assert silent.channel
        assert silent.channel.call("resume", (3,)) is None

    run(test)


@pytest.mark.parametrize("kind", [PeerLostError, PeerError])
def test_a_call_ends_with_its_process_and_the_next_one_goes_through_ray(kind: type[WeightSyncError]) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def load(*_: object) -> LoadReport:
        begun.set()
        may_end.wait(patient(10))
        return REPORT

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"load": load}))
        assert process.channel
        waiting = asyncio.ensure_future(process.call("load", 7, 2.5))
        await asyncio.to_thread(begun.wait, patient(10))
        process.lost.set_exception(kind("engine e0", "killed"))
        with pytest.raises(kind, match="killed"):
            await waiting
        may_end.set()
        assert not process.channel.is_open
        again = Process({"resume": lambda version: None})
        again.key = process.key
        assert await (await opened(channels, again)).call("resume", 3) is None, "a new channel can be opened"

    run(test)


def test_a_process_that_the_driver_forgets_ends_its_part_after_what_it_does() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), asyncio.Event()

    def resume(version: int) -> None:
        begun.set()
        assert may_end.wait(patient(10))

    class Ending(Process):
        async def answer_calls(self, offer: ControlOffer) -> None:
            await super().answer_calls(offer)
            ended.set()

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Ending({"resume": resume}))
        waiting = asyncio.ensure_future(process.call("resume", 3))
        await asyncio.to_thread(begun.wait, patient(10))
        channels.forget(process.key)
        with pytest.raises(PeerError, match="was replaced"):
            await waiting
        assert not ended.is_set()
        may_end.set()
        await asyncio.wait_for(ended.wait(), patient(10))

    run(test)


class Cable:
    """Carries one connection to an endpoint, until it holds everything back, as a link that is down."""

    def __init__(self) -> None:
        self.endpoint, self._carries = "", asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def lay(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")

        async def dialled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, int(port))
            self._tasks.append(asyncio.ensure_future(self._carry(reader, back)))
            self._tasks.append(asyncio.ensure_future(self._carry(there, writer)))

        self._server = await asyncio.start_server(dialled, host)
        self.endpoint = f"tcp://{host}:{self._server.sockets[0].getsockname()[1]}"
        self._carries.set()

    def hold(self) -> None:
        self._carries.clear()

    def let_go(self) -> None:
        self._carries.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._carries.wait()
                writer.write(data)
        finally:
            writer.close()

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()


class Actor:
    """A stand-in for an engine's actor: Ray's calls arrive in order, and the first channel has a cable."""

    def __init__(self) -> None:
        self.cable, self.turns = Cable(), Turns()
        self.asked, self.by_channel = list[str](), list[int]()
        self.channels: list[asyncio.Future[None]] = []
        self.sync_answer_calls = SimpleNamespace(remote=self._answer_calls)
        self.sync_resume = SimpleNamespace(remote=self._resume)

    def _answer_calls(self, offer: ControlOffer) -> Any:
        self.asked.append("answer_calls")
        return self._serve(offer, self.turns.begin(), is_first=len(self.asked) == 1)

    async def _serve(self, offer: ControlOffer, is_newest: Callable[[], bool], is_first: bool) -> None:
        if is_first:
            await self.cable.lay(offer.endpoint)
            offer = msgspec.structs.replace(offer, endpoint=self.cable.endpoint)
        methods = {"resume": self.by_channel.append, "publish_all": self._publish_all}
        serving = asyncio.wrap_future(on_daemon(lambda: answer_calls(offer, methods, is_newest)))
        self.channels.append(serving)
        await serving

    def _publish_all(self, task: PublishTask, tickets: tuple[int, ...], timeout_s: float) -> tuple[Any, Any]:
        self.by_channel.append(int(timeout_s))
        return {}, {}

    async def relay(self, offer: ControlOffer, trainers: object) -> None:
        await self._answer_calls(offer)

    def _resume(self, version: int) -> Any:
        self.asked.append(f"resume {version}")
        return asyncio.sleep(0)


def test_a_call_that_was_given_up_is_not_carried_out_after_the_next_one() -> None:
    async def test(channels: ControlChannels) -> None:
        actor = Actor()
        engine = remote_engine("engine e0", cast("Any", actor))
        channels.open(engine)
        await dialled(engine)
        await engine.resume(2)
        actor.cable.hold()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.resume(3), 0.1)
        await engine.resume(4)
        assert actor.asked == ["answer_calls", "answer_calls", "resume 4"], "the new channel comes first"
        actor.cable.let_go()
        await asyncio.wait_for(actor.channels[0], patient(10))
        await dialled(engine)
        await engine.resume(5)
        assert actor.by_channel == [2, 5]
        actor.cable.close()

    run(test)


def test_what_a_relay_was_asked_in_vain_is_not_carried_out_later() -> None:
    async def test(channels: ControlChannels) -> None:
        actor = Actor()
        holder = SimpleNamespace(
            name="holder 0", key=object(), relay=actor.relay, answers=lambda method: True
        )
        relay = PublishRelay(cast("Any", holder), {})
        channels.open(relay)
        await dialled(relay)
        await relay.publish(PublishTask(count=True), [], 2.0)
        actor.cable.hold()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(relay.publish(PublishTask(count=True), [], 3.0), 0.1)
        with pytest.raises(PeerError, match=r"trainers through holder 0.*no connection"):
            await relay.publish(PublishTask(count=True), [], 4.0)
        async with asyncio.timeout(patient(10)):
            while len(actor.asked) < 2:
                await asyncio.sleep(0.01)
        actor.cable.let_go()
        await asyncio.wait_for(actor.channels[0], patient(10))
        await dialled(relay)
        await relay.publish(PublishTask(count=True), [], 5.0)
        assert actor.by_channel == [2, 5]
        actor.cable.close()

    run(test)


def dial(offer: ControlOffer, secret: str = "") -> Stream:
    return Stream(offer.endpoint, secret or offer.secret, 1 << 20, patient(10))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(patient(10)):
        while not condition():
            await asyncio.sleep(0.01)


async def offered(channels: ControlChannels) -> ControlOffer:
    """Return the offer of a process that has not dialled yet."""
    process = Process({}, dials=False)
    channels.open(process)
    await until(lambda: process.offers)
    return process.offers[0]


@pytest.mark.parametrize("number", [-1, 0, 1, 99])
def test_a_process_does_not_take_the_place_of_another(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Neither with a number that it says nor with the other's secret."""

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"resume": lambda version: None}))
        own = await offered(channels)
        with closing(dial(own)) as friend, closing(dial(process.offers[0])) as second:
            friend.send(msgspec.msgpack.encode({"type": "hello", "number": number}))
            await until(second.is_lost)
            await until(lambda: "should not" in caplog.text)
            assert await process.call("resume", 3) is None
            assert friend.receive(0.01) is None, "it was not asked"

    run(test)
    assert "[engine e0] a second process dials in its place, and is refused" in caplog.text


def test_a_process_that_lost_its_link_gets_its_place_again() -> None:
    async def test(channels: ControlChannels) -> None:
        process = Process({}, dials=False)
        channels.open(process)
        await until(lambda: process.offers)
        for _ in range(3):
            with closing(dial(process.offers[0])):
                await dialled(process)
            await until(lambda: not (process.channel and process.channel.is_open))
        methods = {"resume": lambda version: None}
        on_daemon(lambda: answer_calls(process.offers[0], methods))
        await dialled(process)
        assert await process.call("resume", 3) is None

    run(test)


def test_a_process_that_dials_once_it_is_forgotten_is_disconnected() -> None:
    async def test(channels: ControlChannels) -> None:
        process = Process({}, dials=False)
        channels.open(process)
        await until(lambda: process.offers)
        channels.forget(process.key)
        with closing(dial(process.offers[0])) as late:
            await until(late.is_lost)

    run(test)


def test_strangers_and_garbage_do_not_disturb_it(caplog: pytest.LogCaptureFixture) -> None:
    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"resume": lambda version: None}))
        offer = await offered(channels)
        with closing(dial(offer, "0" * 64)) as stranger, closing(dial(offer)) as friend:
            await until(stranger.is_lost)
            for message in ("garbage", Readable(1), Answer(1, pack(3))):
                friend.send(msgspec.msgpack.encode(message))
            await until(lambda: len(caplog.records) == 3)
            assert not friend.is_lost()
            assert await process.call("resume", 3) is None

    with caplog.at_level(logging.WARNING, "weightsync.control"):
        run(test)
    assert caplog.text.count("sent to the driver what it should not") == 3


@pytest.mark.parametrize(
    ("begins", "says"),
    [(b"GET / HTTP/1.1\r\n", ""), (b"\0\0", ""), (None, "more than 1048576")],
    ids=["another protocol", "no secret", "a message that is too long"],
)
def test_who_does_not_speak_as_agreed_is_disconnected(
    begins: bytes | None, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)

    async def test(channels: ControlChannels) -> None:
        process = await opened(channels, Process({"resume": lambda version: None}))
        offer = await offered(channels)
        host, _, port = offer.endpoint.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(framed(offer.secret.encode()) + b"\xff" * 4 if begins is None else begins)
        assert await asyncio.wait_for(reader.read(), patient(10)) == b""
        writer.close()
        assert await process.call("resume", 3) is None

    with caplog.at_level(logging.WARNING, "weightsync.control"):
        run(test)
    assert says in caplog.text
    assert bool(caplog.records) == bool(says)


@pytest.mark.parametrize(
    "answer",
    [3, {"span": Span("move", 1.0, 1.0), "slow": SentError("StateError", ["late"], None)}],
    ids=["of another type", "with another error"],
)
def test_an_answer_that_cannot_be_decoded_is_the_processs_error(answer: object) -> None:
    async def test(channels: ControlChannels) -> None:
        methods = {"move": lambda *_: answer, "resume": lambda version: None}
        process = await opened(channels, Process(methods))
        with pytest.raises(PeerError, match="engine e0"):
            await process.call("move", 7, True, UpdateTask(), 2.5)
        assert await process.call("resume", 3) is None, "the driver still listens"

    run(test)


def test_a_reply_to_another_call_leaves_the_one_that_waits() -> None:
    async def test(channels: ControlChannels) -> None:
        may_end = threading.Event()
        process = await opened(
            channels, Process({"resume": lambda version: may_end.wait(patient(10)) and None})
        )
        assert process.channel
        waiting = asyncio.ensure_future(process.call("resume", 3))
        await asyncio.sleep(0)
        with pytest.raises(WireError, match="was not asked"):
            process.channel.came(Answer(99, pack(None)))
        may_end.set()
        assert await waiting is None

    run(test)


def test_a_reply_that_comes_while_another_process_is_called_is_taken() -> None:
    may_end = threading.Event()

    def wait(version: int) -> None:
        assert may_end.wait(patient(10))

    async def test(channels: ControlChannels) -> None:
        quick = await opened(channels, Process({"resume": lambda version: None}))
        slow = await opened(channels, Process({"resume": wait}))
        for version in range(2000):
            may_end.clear()
            asked = [asyncio.ensure_future(each.call("resume", version)) for each in (quick, slow)]
            await asked[0]
            may_end.set()
            await asked[1]

    run(test)


def test_an_actor_that_ray_cannot_reach_is_not_taken_for_dead() -> None:
    async def unreachable() -> None:
        raise ActorUnavailableError("the connection timed out", None)

    with pytest.raises(PeerError, match=r"engine e0.*cannot be reached"):
        asyncio.run(answer("engine e0", unreachable()))


def test_an_offer_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(ControlOffer("tcp://127.0.0.1:1", "s3cret"))
