"""The channel by which a holder asks a trainer rank for weights: both ends, in two real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import pytest

from tests.foreign import NASTY
from tests.patience import patient
from weightsync.channel.private_directory import PrivateDirectory
from weightsync.channel.push import Hello, PushEnd, PushFeed
from weightsync.errors import DeadlineError, PeerLostError, TransportError, WireError
from weightsync.protocol.handles import BufferHandle, PushTicket

RING = (BufferHandle(1, 2, "weightsync-x", 3), BufferHandle(1, 3, "weightsync-y", 3))
SOON_S = 0.2


@pytest.fixture
def feed() -> Iterator[PushFeed]:
    feed = PushFeed("trainer 3", "", 2, 3)
    yield feed
    feed.close()


def answer(ticket: PushTicket, digest: str) -> None:
    """Answer asks like a trainer rank: bucket 7 fails, bucket 9 ends the process, 10 is never answered."""
    end = PushEnd(ticket, digest, RING)
    while ask := end.receive():
        if ask.bucket == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if ask.bucket < 9:
            end.answer(ask.ticket, "no such page" if ask.bucket == 7 else "")


@pytest.fixture
def trainer(feed: PushFeed) -> Iterator[multiprocessing.process.BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(feed.ticket, "a plan"))
    process.start()
    assert feed.accept("a plan", patient(30)) == RING
    yield process
    process.kill()
    process.join()


@pytest.mark.usefixtures("trainer")
def test_what_is_asked_for_is_answered_in_any_order_of_waiting(feed: PushFeed) -> None:
    tickets = [feed.ask(bucket, bucket % 2) for bucket in range(4)]
    for bucket in (2, 0, 3, 1):
        feed.wait(tickets[bucket], bucket, patient(10))


@pytest.mark.usefixtures("trainer")
def test_a_rank_that_cannot_push_says_why(feed: PushFeed) -> None:
    with pytest.raises(TransportError, match="trainer 3 cannot push bucket 7: no such page"):
        feed.wait(feed.ask(7, 0), 7, patient(10))
    feed.wait(feed.ask(0, 0), 0, patient(10))


@pytest.mark.usefixtures("trainer")
def test_the_death_of_a_rank_is_noticed_at_once(feed: PushFeed) -> None:
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="trainer 3"):
        feed.wait(feed.ask(9, 0), 9, patient(60))
    assert time.monotonic() - begun < patient(30)
    with pytest.raises(PeerLostError, match="trainer 3"):
        feed.ask(0, 0)


@pytest.mark.usefixtures("trainer")
def test_a_silent_rank_is_named_and_its_push_keeps_the_ring_until_it_is_over(feed: PushFeed) -> None:
    with pytest.raises(DeadlineError, match=r"push of bucket 10.*trainer 3"):
        feed.wait(feed.ask(10, 0), 10, SOON_S)
    with pytest.raises(DeadlineError, match=r"pushes that were given up.*trainer 3"):
        feed.drain(SOON_S)


@pytest.mark.usefixtures("trainer")
def test_pushes_that_were_given_up_are_waited_for(feed: PushFeed) -> None:
    for bucket in (0, 7, 1):
        feed.ask(bucket, 0)
    feed.drain(patient(10))
    feed.drain(0)
    feed.wait(feed.ask(2, 0), 2, patient(10))


@pytest.mark.usefixtures("trainer")
def test_an_abort_ends_a_wait_of_another_thread(feed: PushFeed) -> None:
    threading.Timer(SOON_S, feed.abort, ["engine e0 died"]).start()
    with pytest.raises(TransportError, match="engine e0 died"):
        feed.wait(feed.ask(10, 0), 10, patient(60))


def test_a_rank_that_does_not_come_or_has_another_plan_is_named(feed: PushFeed) -> None:
    with pytest.raises(DeadlineError, match=r"hello.*trainer 3"):
        feed.accept("a plan", SOON_S)
    end = PushEnd(feed.ticket, "another plan", RING)
    with pytest.raises(WireError, match="trainer 3 does not hold plan a plan"):
        feed.accept("a plan", patient(10))
    end.hang_up()
    end.close()


def test_a_process_that_is_not_the_rank_does_not_take_its_place(feed: PushFeed) -> None:
    without_secret = msgspec.msgpack.encode(Hello(b"guess", "a plan", RING))
    with ExitStack() as strangers:
        for data in (None, *NASTY.values(), without_secret):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            strangers.enter_context(stranger).connect(feed.ticket.endpoint)
            if data is not None:  # else it is silent
                stranger.send(data[: 32 << 10])
        end = PushEnd(feed.ticket, "a plan", RING)
        assert feed.accept("a plan", patient(10)) == RING
    threading.Thread(target=lambda: (ask := end.receive()) and end.answer(ask.ticket)).start()
    feed.wait(feed.ask(3, 0), 3, patient(10))
    end.close()


def test_a_rank_that_is_asked_in_no_words_of_ours_hangs_up(feed: PushFeed) -> None:
    directory = PrivateDirectory()
    ticket = replace(feed.ticket, endpoint=str(directory.path / "push"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(ticket.endpoint)
        listener.listen()
        for data in NASTY.values():
            end = PushEnd(ticket, "a plan", RING)
            with listener.accept()[0] as holder:
                assert holder.recv(1 << 16)
                holder.send(data[: 32 << 10])
                assert end.receive() is None
                if data:  # else the holder seems to have hung up
                    assert holder.recv(1 << 16) == b""
            end.close()
    directory.remove()


def test_a_holder_that_is_gone_is_noticed(feed: PushFeed) -> None:
    end = PushEnd(feed.ticket, "a plan", RING)
    feed.accept("a plan", patient(10))
    feed.close()
    assert end.receive() is None
    end.answer(1)
    end.close()
    with pytest.raises(PeerLostError, match="its holder"):
        PushEnd(feed.ticket, "a plan", RING)
