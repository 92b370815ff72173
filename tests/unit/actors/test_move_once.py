"""A holder moves once for an attempt, and answers all who ask."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patient
from weightsync.actors.holders import weight_holder
from weightsync.actors.holders.weight_holder import WeightHolder
from weightsync.actors.relays.move_once import MoveOnce
from weightsync.errors import DeadlineError, PeerError, StateError, TransportError
from weightsync.holder.holder import Holder
from weightsync.node.messages import NodeOffer
from weightsync.protocol.messages import Moved, Receive, UpdateTask
from weightsync.protocol.timing import Span

MOVED = Moved(Span("move", 1.0, 2.0))


def never() -> Moved:
    raise AssertionError("it moves again")


def test_who_asks_again_gets_the_same_answer() -> None:
    once, begun, may_end = MoveOnce("holder 0"), threading.Event(), threading.Event()

    def work() -> Moved:
        begun.set()
        assert may_end.wait(patient(10))
        return MOVED

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.move, 3, work, patient(10))
        assert begun.wait(patient(10))
        second = pool.submit(once.move, 3, never, patient(10))
        assert not second.done()
        may_end.set()
        assert first.result(patient(10)) is second.result(patient(10)) is MOVED
    assert once.move(3, never, patient(10)) is MOVED
    later = Moved(Span("move", 3.0, 2.0))
    assert once.move(5, lambda: later, patient(10)) is later


@pytest.mark.parametrize(
    ("raised", "again"),
    [
        (TransportError("rank 1 left"), TransportError("rank 1 left")),
        (RuntimeError("no memory"), PeerError("holder 0", "RuntimeError: no memory")),
    ],
)
def test_who_asks_again_gets_the_same_error(raised: Exception, again: Exception) -> None:
    once = MoveOnce("holder 0")

    def work() -> Moved:
        raise raised

    with pytest.raises(type(raised)):
        once.move(3, work, patient(10))
    with pytest.raises(type(again)) as caught:
        once.move(3, never, patient(10))
    assert caught.value.args == again.args
    assert caught.value is not raised, "its traceback would keep memory mapped"


def test_who_asks_again_waits_no_longer_than_asked() -> None:
    once, begun, may_end = MoveOnce("holder 0"), threading.Event(), threading.Event()

    def work() -> Moved:
        begun.set()
        assert may_end.wait(patient(10))
        return MOVED

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(once.move, 3, work, patient(10))
        assert begun.wait(patient(10))
        with pytest.raises(DeadlineError) as caught:
            once.move(3, never, 0.01)
        may_end.set()
        assert first.result(patient(10)) is MOVED
    assert (caught.value.phase, caught.value.missing) == ("move", ("holder 0",))


def test_what_was_given_up_is_not_carried_out() -> None:
    once = MoveOnce("holder 0")
    once.move(3, lambda: MOVED, patient(10))
    with pytest.raises(StateError, match="holder 0 was asked for attempt 2 after"):
        once.move(2, never, patient(10))
    once.close()
    with pytest.raises(StateError, match="holder 0 was asked for attempt 4 after"):
        once.move(4, never, patient(10))


def test_a_relay_has_no_part_in_what_is_prepared_after_it_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    peers: list[Any] = []
    stopped: list[int] = []

    def serve(offer: NodeOffer, peer: object, protocol: type) -> SimpleNamespace:
        peers.append(peer)
        number = len(peers)
        welcomed = SimpleNamespace(result=lambda: None)
        return SimpleNamespace(welcomed=welcomed, stop=lambda: stopped.append(number))

    def relayed(peer: Any, attempt: int) -> Moved:
        moved: Moved = peer.move(attempt, Receive(), 1.0)
        return moved

    monkeypatch.setattr(weight_holder, "serve", serve)
    asked: list[int] = []

    def move(holder: Holder, attempt: int, task: UpdateTask, timeout_s: float) -> Moved:
        asked.append(attempt)
        return MOVED

    monkeypatch.setattr(Holder, "move", move)
    monkeypatch.setattr(Holder, "prepare", lambda *_: None)
    holder = WeightHolder("holder 0", "127.0.0.1", "gloo", "", None)
    prepare: Any = holder.prepare
    for attempt in (1, 2):  # the numbers of another driver begin again
        prepare(None, 0, "")
        holder.answer_relay(NodeOffer("tcp://127.0.0.1:1", ""))
        assert relayed(peers[-1], attempt) is MOVED
        assert holder.move(attempt, Receive(), 1.0) is MOVED
    with pytest.raises(StateError, match="after it was given up"):
        relayed(peers[0], 3)
    assert asked == [1, 2]
    assert stopped == [1], "the node of the earlier connect"
