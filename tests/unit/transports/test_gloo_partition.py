"""Ranks of gloo that cannot reach each other, though both reach the first rank."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.holder.broadcasts import Communicators
from weightsync.plan import Members
from weightsync.transports import gloo
from weightsync.transports.gloo import GlooTransport
from weightsync.transports.reach import CONNECTED, Reach
from weightsync.transports.store import NetworkStore, StoreServer

TIMEOUT_S = patient(0.25)


def test_ranks_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Group:
        """Torch's group as it would be: made on rank 0, while the others wait for each other."""

        _Options = SimpleNamespace

        def __init__(self, store: object, rank: int, num_ranks: int, options: object) -> None:
            if rank:
                ended.wait(patient(30))

        @staticmethod
        def create_device(hostname: str) -> None:
            pass

    monkeypatch.setattr(gloo, "ProcessGroupGloo", Group)
    ranks = [GlooTransport() for _ in range(3)]
    meeting = ranks[0].offer("127.0.0.1")

    def join(rank: int) -> str:
        try:
            ranks[rank].open(meeting, rank, 3, TIMEOUT_S)
        except TransportError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        said = [*threads.map(join, range(3))]
        ended.set()
    for rank in reversed(ranks):
        rank.close()
    assert said[0] == ""
    assert all("ranks 1, 2 of 3 did not connect to every other" in each for each in said[1:]), said
    assert not any("does not reach" in each for each in said), "they answer each other here"


def test_a_rank_without_an_answer_is_named_with_its_address() -> None:
    """Rank 2 says that it listens where nobody does; rank 0, which stopped listening, is connected."""
    serving = StoreServer("127.0.0.1")
    store = NetworkStore(serving.address, TIMEOUT_S)
    first, second = Reach(store, 0, 3, "127.0.0.1"), Reach(store, 1, 3, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        store.set("listens/2", f"127.0.0.1:{closed.getsockname()[1]}")
    store.set(CONNECTED.format(0), "")
    first.close()
    assert second.unconnected() == [1, 2]
    assert second.text() == ""
    second.examine()
    assert second.text() == "rank 1 at 127.0.0.1 does not reach rank 2 at 127.0.0.1 (Connection refused)"
    second.close()
    store.close()
    serving.close()


def test_a_holder_that_cannot_join_says_which_holders_the_ranks_are() -> None:
    def refuse(*_: object) -> None:
        raise TransportError("rank 1 of 2 is not there")

    members = Members(num_holders=4, trainers=(1,), engines=(("e0", (3,)),))
    plan = cast("Any", SimpleNamespace(slots=2, members=members))
    communicators = Communicators(plan, 3, False, lambda: cast("Any", SimpleNamespace(open=refuse)))
    (group,) = communicators.transports
    with pytest.raises(
        TransportError, match=r"rank 1 of 2 is not there \(the ranks are holder 1, holder 3, in"
    ):
        communicators.join({group: ""}, TIMEOUT_S)
