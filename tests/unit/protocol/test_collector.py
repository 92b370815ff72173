"""The garbage collector goes on once nobody wants it paused, if it was on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tests.patience import patient
from weightsync.protocol.collector import collector_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_paused_until_the_outermost_block_ends() -> None:
    @collector_paused
    def inner() -> bool:
        return gc.isenabled()

    with collector_paused:
        assert not inner()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), collector_paused:
        raise ValueError("no")
    assert gc.isenabled()


def test_it_stays_off_if_it_was_off() -> None:
    gc.disable()
    with collector_paused:
        pass
    assert not gc.isenabled()


def test_it_is_paused_until_the_last_thread_has_left() -> None:
    entered, may_leave, seen = threading.Event(), threading.Event(), list[bool]()

    def other() -> None:
        with collector_paused:
            entered.set()
            may_leave.wait(patient(10))
            seen.append(gc.isenabled())

    thread = threading.Thread(target=other)
    with collector_paused:
        thread.start()
        assert entered.wait(patient(10))
    assert not gc.isenabled()
    may_leave.set()
    thread.join(patient(10))
    assert seen == [False]
    assert gc.isenabled()
