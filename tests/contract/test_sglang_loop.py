"""The thread that owns SGLang's event loop, with a fake of SGLang that makes a token per request and permit.

`test_engines.py` runs it with SGLang itself, where that is installed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from tests.contract.request_loops import TIMEOUT_S, FakeServer, loop_of, made, make, of, until
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.errors import DeadlineError, EngineError, StateError


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def loop(server: FakeServer, threads: ThreadPoolExecutor) -> Iterator[RequestLoop]:
    """Closed before `threads` are, or a failed test would wait for them for ever."""
    loop = loop_of(server)
    yield loop
    assert loop.close(TIMEOUT_S)


def test_it_starts_paused_and_without_a_version(server: FakeServer, loop: RequestLoop) -> None:
    assert (server.calls, loop.frozen, loop.serving) == (["pause retract"], True, 0)
    with pytest.raises(StateError, match="no committed version"):
        loop.complete([[1]], of(1))


def test_keep_says_how_many_tokens_each_version_made(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    make(server, 2)
    loop.freeze("keep", TIMEOUT_S)
    assert (loop.frozen, loop.serving) == (True, 0)
    loop.freeze("keep", TIMEOUT_S)  # is nothing new
    held = threads.submit(loop.complete, [[1]], of(1))
    loop.resume(2)
    make(server, 2)
    assert running.result(TIMEOUT_S) == [made((1, 2), (2, 1))]
    assert held.result(TIMEOUT_S) == [made((2, 1))]
    assert server.calls == ["pause retract", "go on", "pause retract", "go on"]


def test_a_wait_that_is_too_long_lets_all_go_on(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(server, 1)
    with pytest.raises(DeadlineError, match="e0"):
        loop.freeze("wait", 0.01)
    assert loop.serving == 1
    late = threads.submit(loop.complete, [[1]], of(1))
    make(server, 2)
    assert running.result(TIMEOUT_S) == [made((1, 2))]
    assert late.result(TIMEOUT_S) == [made((1, 1))]


def test_a_stop_token_ends_a_request_and_is_its_last(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(9, stops=(2, 7)))
    make(server, 3)
    assert running.result(TIMEOUT_S) == [made((1, 3), reason="stop")]
    until(lambda: server.aborted == ["e0-0-"])


def test_melt_goes_on_with_the_version_that_there_was(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(server, 1)
    loop.freeze("keep", TIMEOUT_S)
    loop.undo_freeze()
    make(server, 1)
    assert running.result(TIMEOUT_S) == [made((1, 2))]
    assert loop.serving == 1


def test_void_turns_everybody_away(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(5))
    make(server, 1)
    loop.freeze("keep", TIMEOUT_S)
    held = threads.submit(loop.complete, [[1]], of(1))
    until(lambda: loop.num_held == 1)
    loop.invalidate()
    for turned_away in (running, held):
        with pytest.raises(StateError, match="failed update"):
            turned_away.result(TIMEOUT_S)
    with pytest.raises(StateError, match="no committed version"):
        loop.complete([[1]], of(1))
    loop.resume(2)
    until(lambda: loop.num_running == 0)
    late = threads.submit(loop.complete, [[1]], of(1))
    make(server, 1)
    assert late.result(TIMEOUT_S) == [made((2, 1))]


def test_a_call_while_serving_holds_the_steps_only(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(2))
    make(server, 1)

    async def paused(server: FakeServer) -> str | None:
        return server.paused

    assert loop.call(paused) == "in_place"
    assert server.calls[-2:] == ["pause in_place", "go on"]
    make(server, 1)
    assert running.result(TIMEOUT_S) == [made((1, 2))]


def test_a_call_may_be_given_up(server: FakeServer, loop: RequestLoop) -> None:
    going_on = threading.Event()

    async def slow(_: FakeServer) -> None:
        while not going_on.is_set():
            await asyncio.sleep(0.001)

    with pytest.raises(FutureTimeoutError):
        loop.call(slow, 0.01)
    going_on.set()
    loop.resume(1)
    assert loop.serving == 1


@pytest.mark.parametrize("forgot", [True, False])
def test_it_serves_only_once_caches_are_forgotten(forgot: bool) -> None:
    server = FakeServer(forgets=True)
    server.forgot = forgot
    loop = RequestLoop("e0", lambda: server, FakeServer.stop)
    loop.has_cached = True
    if forgot:
        loop.resume(1)
    else:
        with pytest.raises(EngineError, match="cached"):
            loop.resume(1)
    assert server.calls == ["pause retract", "forget", *(["go on"] if forgot else [])]
    assert loop.serving == (1 if forgot else 0)
    assert loop.close(TIMEOUT_S)
