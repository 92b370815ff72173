"""The socket between a holder and its engine rank: who may speak, and what happens to the rest."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from tests.foreign import NASTY
from tests.forked import said_by
from tests.patience import patient
from weightsync.channel.feed import EngineFeed, HolderFeed
from weightsync.channel.wire import Cancel, FeedHello, Ready, encode
from weightsync.errors import (
    DeadlineError,
    EngineError,
    PeerLostError,
    StateError,
    TransportError,
    WeightSyncError,
    WireError,
)
from weightsync.memory.host import SharedBuffer
from weightsync.plan import Layout, Members, Plan, make_plan
from weightsync.protocol.messages import HolderDigests
from weightsync.testing import DictEngine


@pytest.fixture
def plan() -> Plan:
    layout = Layout.from_ranks(list(DictEngine("e0", {"a": torch.zeros(10), "b": torch.zeros(500)}).layout()))
    members = Members(2, (0,), (("e0", (1,)),))
    return make_plan(layout, {"e0": layout}, members, bucket_bytes=1024, max_staging_bytes=1 << 20)


@pytest.fixture
def holder(plan: Plan):
    slots = [SharedBuffer.create(plan.max_bucket_nbytes) for _ in range(plan.slots)]
    feed = HolderFeed("holder 1", "e0", tuple(slot.handle for slot in slots), None, -1)
    yield feed
    feed.close()
    for slot in slots:
        slot.close()


def _directory(feed: HolderFeed) -> Path:
    return Path(feed.ticket.endpoint.removeprefix("ipc://")).parent


class Sink(DictEngine):
    """Takes buckets of `plan` without being attached."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("e0", {"a": torch.ones(10), "b": torch.ones(500)})
        self._plan = plan


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(10)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _accept(feed: HolderFeed, plan: Plan, errors: list[Exception]) -> threading.Thread:
    def run() -> None:
        try:
            feed.accept(plan.digest(), 10)
        except Exception as error:  # noqa: BLE001 (looked at by the test)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _connected(feed: HolderFeed, plan: Plan) -> EngineFeed:
    errors: list[Exception] = []
    thread = _accept(feed, plan, errors)
    engine = EngineFeed.open(feed.ticket, plan, patient(10))
    thread.join()
    assert not errors
    return engine


def test_the_holder_learns_that_it_may_quantise_and_loses_no_message(holder: HolderFeed, plan: Plan) -> None:
    engine = _connected(holder, plan)
    assert not holder.is_writable()
    engine.refuse(1, StateError("moved"))
    engine.allow_writing()
    _until(holder.is_writable)
    with pytest.raises(EngineError, match="moved"):
        holder.wait_done(1, 0, patient(10))
    engine.close()


def test_digests_of_many_tensors_reach_the_engine_rank(holder: HolderFeed, plan: Plan) -> None:
    class Quantizing(Sink):
        def written(self, by_holder: HolderDigests | None = None) -> None:
            came.append(by_holder)

    came: list[HolderDigests | None] = []
    engine = _connected(holder, plan)
    made = HolderDigests(*np.arange(400_000, dtype=np.uint64).reshape(2, -1))
    holder.written(1, made)
    engine.receive(1, Quantizing(plan), patient(10))
    (got,) = came
    assert got
    np.testing.assert_array_equal(got.wholes, made.wholes)
    np.testing.assert_array_equal(got.stored, made.stored)
    engine.close()


def test_the_socket_lies_in_a_private_directory_that_goes_once_connected(
    holder: HolderFeed, plan: Plan
) -> None:
    directory = _directory(holder)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    engine = _connected(holder, plan)
    assert not directory.exists()
    engine.close()


def test_a_stray_clients_bytes_are_refused_and_logged_and_hurt_nothing(
    holder: HolderFeed, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = []
    thread = _accept(holder, plan, errors)
    context = zmq.Context()
    strays = []
    wrong = encode(FeedHello(secret=b"guess", engine="e0", plan_digest=plan.digest()))
    for data in (*NASTY.values(), b"\x80\x04garbage", b"x" * 60_000, b"y" * 200_000, wrong):
        stray = context.socket(zmq.DEALER)
        stray.connect(holder.ticket.endpoint)
        stray.send(data)
        strays.append(stray)
    strays[0].send_multipart([b"many", b"frames", b"of", b"it"])
    _until(lambda: "without the run's secret" in caplog.text)
    assert thread.is_alive()
    engine = EngineFeed.open(holder.ticket, plan, patient(10))
    thread.join()
    assert not errors
    strays[0].send(wrong)
    for bucket in range(plan.num_buckets):
        holder.send(Ready(1, bucket))
    assert len(engine.receive(1, Sink(plan), patient(5))) == 2
    context.destroy(linger=0)
    engine.close()
    assert caplog.text.count("refused") >= 5


def test_an_engine_with_another_plan_is_refused(holder: HolderFeed, plan: Plan) -> None:
    errors: list[Exception] = []
    thread = _accept(holder, plan, errors)
    layout = Layout.from_ranks(list(DictEngine("e0", {"a": torch.zeros(11)}).layout()))
    other = make_plan(
        layout,
        {"e0": layout},
        Members(2, (0,), (("e0", (1,)),)),
        bucket_bytes=1024,
        max_staging_bytes=1 << 20,
    )
    with pytest.raises(DeadlineError, match="holder 1"):
        EngineFeed.open(holder.ticket, other, 0.2)
    thread.join()
    assert isinstance(errors[0], WireError)


def test_waits_have_deadlines_that_name_who_did_not_come(holder: HolderFeed, plan: Plan) -> None:
    with pytest.raises(DeadlineError, match="engine e0"):
        holder.accept(plan.digest(), 0.1)
    engine = _connected(holder, plan)
    with pytest.raises(DeadlineError, match="engine e0"):
        holder.wait_done(1, 0, 0.1)
    with pytest.raises(DeadlineError, match="holder 1"):
        engine.receive(1, DictEngine("e0", {}), 0.1)
    engine.close()


def test_a_dropped_engine_is_not_waited_for(holder: HolderFeed, plan: Plan) -> None:
    engine = _connected(holder, plan)
    waiter: list[Exception] = []

    def wait() -> None:
        try:
            holder.wait_done(1, 0, patient(30))
        except Exception as error:  # noqa: BLE001 (looked at below)
            waiter.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    holder.drop()
    thread.join(patient(5))
    assert isinstance(waiter[0], EngineError)
    engine.close()


def test_a_cancelled_attempt_ends_the_engines_wait_and_the_next_one_reads_past_it(
    holder: HolderFeed, plan: Plan
) -> None:
    engine = _connected(holder, plan)
    holder.send(Ready(1, 0))
    holder.send(Cancel(1, "a peer was lost"))
    sink = Sink(plan)
    with pytest.raises(TransportError, match="a peer was lost"):
        engine.receive(1, sink, patient(5))
    holder.send(Ready(1, 1))
    for bucket in range(plan.num_buckets):
        holder.send(Ready(2, bucket))
    assert len(engine.receive(2, sink, patient(5))) == 2
    assert not sink.tensors["b"].any()
    engine.close()


def test_a_ticket_does_not_show_its_secret(holder: HolderFeed) -> None:
    assert repr(holder.ticket.secret) not in repr(holder.ticket)
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(holder.ticket), type=type(holder.ticket))
        == holder.ticket
    )


def _killed(pipe: Connection) -> None:
    slots = [SharedBuffer.create(2048) for _ in range(2)]
    feed = HolderFeed("holder 1", "e0", tuple(slot.handle for slot in slots), None, -1)
    assert Path(feed.ticket.endpoint.removeprefix("ipc://")).exists()
    pipe.send(feed.ticket)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_holders_ticket_is_refused_and_its_directory_goes(plan: Plan) -> None:
    ticket = said_by(_killed, exitcode=-signal.SIGKILL)
    with pytest.raises(PeerLostError):
        EngineFeed.open(ticket, plan, patient(1))
    directory = Path(ticket.endpoint.removeprefix("ipc://")).parent
    _until(lambda: not directory.exists())


def test_closing_ends_a_load_that_waits(holder: HolderFeed, plan: Plan) -> None:
    engine = _connected(holder, plan)
    raised: list[Exception] = []
    sink, took = Sink(plan), threading.Event()
    sink.on_write = lambda _: took.set()
    holder.send(Ready(1, 0))

    def load() -> None:
        try:
            engine.receive(1, sink, patient(60))
        except WeightSyncError as error:
            raised.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    assert took.wait(patient(10))
    begun = time.monotonic()
    engine.close()
    engine.close()
    thread.join()
    assert "connected again" in str(raised[0])
    assert time.monotonic() - begun < patient(5)


def test_an_engine_whose_holder_gives_it_up_before_the_welcome_does_not_wait(
    plan: Plan, holder: HolderFeed
) -> None:
    holder.drop()
    begun = time.monotonic()
    with pytest.raises(TransportError, match="holder 1 gave up e0"):
        EngineFeed.open(holder.ticket, plan, patient(30))
    assert time.monotonic() - begun < patient(5)
