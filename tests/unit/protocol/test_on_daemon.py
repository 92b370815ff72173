"""Calls on daemon threads: their results, and what is left of them when the process may exit."""

from __future__ import annotations

import threading
import weakref

import pytest

from tests.patience import patient
from weightsync.protocol.daemon import on_daemon


class Call:
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self) -> bool:
        assert self.may_end.wait(patient(60))
        return threading.current_thread().daemon


def test_a_call_is_gone_when_its_result_is_known() -> None:
    """A C++ object that it holds must not be destroyed on a daemon thread while the process exits."""
    call, seen = Call(), list[bool]()
    end = weakref.finalize(call, lambda: None)
    future = on_daemon(call)
    future.add_done_callback(lambda _: seen.append(end.alive))
    call.may_end.set()
    del call
    assert future.result(patient(60))
    assert seen == [False]


def test_an_error_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        on_daemon(lambda: 1 // 0).result(patient(60))
