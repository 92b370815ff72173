"""Roll calls over an in-process store: who is named, and who must not be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from tests.patience import patient
from weightsync.errors import TransportError
from weightsync.transports import roll_call
from weightsync.transports.roll_call import Absence, RollCall, ranks_text


class DyingStore:
    """A store whose host dies after `calls` further calls."""

    def __init__(self, store: Store, calls: int) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> object:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("Failed to recv, got 0 bytes")
        return getattr(self._store, name)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "ANSWER_S", patient(0.1))
    monkeypatch.setattr(roll_call, "SEE_OFF_S", patient(0.1))


def answers(store: Store, states: Mapping[int, tuple[dict[int, int], bool]], num_ranks: int) -> list[Absence]:
    """What the ranks of `states` (meetings, waiting) find, all answering at once."""
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(RollCall(store, rank, num_ranks).answer, meetings, waiting)
            for rank, (meetings, waiting) in states.items()
        ]
        return [future.result(patient(10)) for future in futures]


def test_all_that_sign_in_go_on() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: RollCall(store, rank, 3).sign_in(patient(5)), range(3)))


def test_a_sign_in_names_the_missing() -> None:
    store, both = HashStore(), threading.Barrier(2)

    def sign_in(rank: int) -> None:
        both.wait()
        with pytest.raises(TransportError, match=r"ranks 1, 3 of 4 did not come within 0.2 s"):
            RollCall(store, rank, 4).sign_in(0.2)

    with ThreadPoolExecutor() as pool:
        list(pool.map(sign_in, (0, 2)))


def test_the_silent_are_missing_for_everyone() -> None:
    store = HashStore()
    RollCall(store, 1, 4).call(7, {0: 5, 2: 5, 3: 5}, "a fault")
    found = answers(store, {0: ({1: 5}, True), 1: ({}, True), 3: ({1: 5}, True)}, 4)
    assert found == [Absence(1, 7, "a fault", (2,))] * 3


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        (({0: 2}, True), ()),  # waits for others itself: not its fault
        (({0: 3}, False), ()),  # came and is done
        (({0: 9}, False), ()),
        (({0: 2}, False), (1,)),  # alive and behind
        (({2: 9}, False), (1,)),  # far with others, never met the caller
    ],
)
def test_an_answer_is_judged_by_how_often_the_two_have_met(
    state: tuple[dict[int, int], bool], missing: tuple[int, ...]
) -> None:
    store = HashStore()
    RollCall(store, 0, 2).call(3, {1: 3})
    assert answers(store, {0: ({1: 3}, True), 1: state}, 2) == [Absence(0, 3, "", (), missing)] * 2


def test_only_who_was_needed_can_be_missing() -> None:
    store = HashStore()
    RollCall(store, 0, 4).call(3, {2: 1})
    assert answers(store, {0: ({2: 1}, True)}, 4) == [Absence(0, 3, "", (2,))]


def test_the_first_call_counts() -> None:
    store = HashStore()
    RollCall(store, 1, 3).call(4, {0: 4, 2: 4})
    RollCall(store, 0, 3).call(5, {1: 5, 2: 5})
    found = answers(store, {0: ({1: 5, 2: 5}, True), 1: ({0: 4, 2: 4}, True)}, 3)
    assert found == [Absence(1, 4, "", (2,))] * 2


def test_a_dead_store_names_its_host_alone() -> None:
    store = HashStore()
    RollCall(store, 1, 4).call(7, {0: 5, 2: 5, 3: 5})
    dying = RollCall(DyingStore(store, calls=8), 1, 4)  # type: ignore[arg-type]
    assert dying.answer({}, waiting=True) == Absence(1, 7, "", (0,))


def test_a_host_that_answered_before_its_store_went_is_not_named() -> None:
    store = HashStore()
    RollCall(store, 1, 4).call(7, {0: 5, 2: 5, 3: 5})
    store.set("here/0", '{"meetings": {"1": 5}, "waiting": true}')
    dying = RollCall(DyingStore(store, calls=20), 1, 4)  # type: ignore[arg-type]
    assert dying.answer({}, waiting=True) == Absence(1, 7, "", (2, 3))


def test_a_leaver_says_how_often_it_met_each_and_why_it_went() -> None:
    store = HashStore()
    RollCall(store, 2, 3).leave({0: 4, 1: 1}, "the run is over")
    assert RollCall(store, 0, 3).has_news()
    assert RollCall(store, 0, 3).left() == {2: (4, "the run is over")}
    assert RollCall(store, 1, 3).left() == {2: (1, "the run is over")}


VALUES = [
    b"",
    b"no JSON",
    b"\xff\xfe",
    b"[]",
    b"7",
    b'{"meetings": 1, "waiting": true, "cause": "", "caller": 0, "operation": 1, "fault": ""}',
    b'{"meetings": {"a": 1}}',
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_is_not_ours_is_ignored_and_logged(
    value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    for key in ("call", "left/1", "here/1"):
        store.set(key, value.decode("latin-1"))
    roll = RollCall(store, 0, 2)
    assert not roll.called()
    assert roll.left() == {}
    assert roll.answer({}, waiting=False) == Absence(0, 0, "the roll call in the store is not ours", ())
    roll.call(3, {1: 3})
    assert roll.called()
    assert roll.answer({1: 3}, waiting=True) == Absence(0, 3, "", (1,))
    assert "[rank 0] ignores" in caplog.text


def test_ranks_read_as_a_sentence() -> None:
    assert ranks_text([2], 4) == "rank 2 of 4"
    assert ranks_text([3, 1], 4) == "ranks 1, 3 of 4"
