"""If Ctrl-C interrupts a call, the next call of the same thread waits for the end of its work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interrupts import interrupt_waiting_call
from tests.patience import patient
from weightsync.actors.ray.loop import LoopThread
from weightsync.errors import StateError


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


class Work:
    """Goes on until `may_end`. It interrupts the main thread, as Ctrl-C does."""

    def __init__(self) -> None:
        self.may_end, self.ended = threading.Event(), False

    async def __call__(self) -> str:
        await interrupt_waiting_call()
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        self.ended = True
        return "first"


async def second() -> str:
    return "second"


def interrupt(loop: LoopThread, *also: LoopThread) -> Work:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        loop.submit(work, also).result(patient(20))
    return work


def test_the_next_call_waits_for_the_end_of_one_that_was_interrupted(loop: LoopThread) -> None:
    for _ in range(5):
        work = interrupt(loop)
        threading.Timer(0.05, work.may_end.set).start()
        assert loop.submit(second).result(patient(20)) == "second"
        assert work.ended


def test_an_interrupted_update_of_two_models_holds_up_calls_of_each(loop: LoopThread) -> None:
    other = LoopThread(loop)
    work = interrupt(loop, other)
    threading.Timer(0.05, work.may_end.set).start()
    assert other.submit(second).result(patient(20)) == "second"
    assert work.ended


def test_whoever_waits_for_that_may_be_interrupted_too(loop: LoopThread) -> None:
    work = interrupt(loop)
    loop.run_concurrently(interrupt_waiting_call())
    with pytest.raises(KeyboardInterrupt):
        loop.submit(second)
    assert not work.ended
    work.may_end.set()
    assert loop.submit(second).result(patient(20)) == "second"


def test_other_threads_and_whoever_has_the_future_are_refused(loop: LoopThread) -> None:
    work = interrupt(loop)
    with ThreadPoolExecutor() as threads, pytest.raises(StateError, match="an update is running"):
        threads.submit(loop.submit, second).result(patient(20))
    work.may_end.set()
    loop.end_interrupted()
    going_on = asyncio.Event()
    handed_out = loop.submit(going_on.wait)
    handed_out.caller = None
    with pytest.raises(StateError, match="an update is running"):
        loop.submit(second)
    loop.run_concurrently(_set(going_on)).result(patient(20))
    assert handed_out.result(patient(20))


async def _set(event: asyncio.Event) -> None:
    event.set()
