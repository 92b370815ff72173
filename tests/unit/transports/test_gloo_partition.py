"""Ranks of gloo that cannot reach each other, though both reach the first rank."""

from __future__ import annotations

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
