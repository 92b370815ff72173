"""The thread that owns SGLang's event loop, with a fake of SGLang that makes a token per request and permit.

`test_engines.py` runs it with SGLang itself, where that is installed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from tests.patience import patient
from weightsync.engines.base import Completion
from weightsync.engines.serving.request_loop import Made, Params, RequestLoop
from weightsync.errors import DeadlineError, EngineError, RankLostError, StateError

TIMEOUT_S = patient(10)


class FakeServer:
    """A request's ``n`` is its number of tokens: 0, 1, 2 and so on. Paused, it makes none."""

    def __init__(self, forgets: bool = False) -> None:
        self.loop = asyncio.new_event_loop()
        self.forgets, self.forgot, self.broken = forgets, True, False
        self.permits = threading.Semaphore(0)
        self.made = threading.Semaphore(0)
        self.paused: str | None = None
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.stops = 0

    async def run(
        self,
        name: str,
        prompt: Sequence[int],
        params: Mapping[str, int],
        on_made: Callable[[Made], object],
        salt: str,
    ) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        tokens: list[int] = []
        while len(tokens) < params["n"]:
            if name in self.aborted:
                on_made(made_of(tokens[-1:], "abort"))  # as SGLang tells of a request that waits
                return
            if self.paused or not self.permits.acquire(blocking=False):
                await asyncio.sleep(0.001)
                continue
            tokens.append(len(tokens))
            on_made(made_of(tokens, "length" if len(tokens) == params["n"] else ""))
            self.made.release()

    def abort(self, name: str) -> None:
        assert name not in self.aborted
        self.aborted.append(name)

    async def pause(self, mode: str) -> None:
        self.paused = mode
        self.calls.append(f"pause {mode}")

    async def go_on(self) -> None:
        self.paused = None
        self.calls.append("go on")

    async def forget(self) -> bool:
        self.calls.append("forget")
        return self.forgot

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def loop(server: FakeServer, threads: ThreadPoolExecutor) -> Iterator[RequestLoop]:
    """Closed before `threads` are, or a failed test would wait for them for ever."""
    loop = RequestLoop("e0", lambda: server, FakeServer.stop)
    yield loop
    assert loop.close(TIMEOUT_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def made(*segments: tuple[int, int], reason: str = "length") -> Completion:
    """A completion by the fake."""
    tokens = list(range(sum(number for _, number in segments)))
    return Completion(tokens, list(segments), [-float(token) for token in tokens], reason)


def made_of(tokens: Sequence[int], reason: str) -> Made:
    return Made(tokens, lambda: [-float(token) for token in tokens], reason)


def of(n: int, *stops: int) -> list[Params]:
    return [Params({"n": n}, frozenset(stops))]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline


def make(server: FakeServer, num_tokens: int) -> None:
    for _ in range(num_tokens):
        server.permits.release()
        assert server.made.acquire(timeout=TIMEOUT_S)


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


def test_wait_lets_running_requests_end_and_holds_new_ones(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    make(server, 1)
    frozen = threads.submit(loop.freeze, "wait", TIMEOUT_S)
    until(lambda: loop.serving == 0)
    held = threads.submit(loop.complete, [[1]], of(1))
    make(server, 2)
    frozen.result(TIMEOUT_S)
    assert running.result(TIMEOUT_S) == [made((1, 3))]
    assert not held.done()
    loop.resume(2)
    make(server, 1)
    assert held.result(TIMEOUT_S) == [made((2, 1))]


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


def test_abort_ends_running_requests_with_what_they_have(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(9))
    make(server, 3)
    loop.freeze("abort", TIMEOUT_S)
    assert running.result(TIMEOUT_S) == [made((1, 3), reason="abort")]


def test_a_stop_token_ends_a_request_and_is_its_last(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(9, 2, 7))
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


def test_what_sglang_says_of_a_request_names_the_engine(server: FakeServer, loop: RequestLoop) -> None:
    loop.resume(1)
    with pytest.raises(EngineError, match="e0 failed in generate: ValueError: the prompt is empty"):
        loop.complete([[]], of(1))


def test_all_are_told_of_a_lost_rank_and_of_the_end(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(5))
    make(server, 1)
    loop.fail(RankLostError("e0", "watch", "its process 7 ended", 1))
    with pytest.raises(RankLostError, match="rank 1"):
        running.result(TIMEOUT_S)
    for ask in (
        loop.require_ranks,
        lambda: loop.freeze("keep", TIMEOUT_S),
        lambda: loop.complete([[1]], of(1)),
    ):
        with pytest.raises(RankLostError, match="rank 1"):
            ask()
    assert loop.close(TIMEOUT_S)
    assert loop.close(TIMEOUT_S)
    assert server.stops == 1


def test_closing_tells_who_waits(server, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(5))
    make(server, 1)
    assert loop.close(TIMEOUT_S)
    with pytest.raises(StateError, match="closed"):
        running.result(TIMEOUT_S)
    with pytest.raises(StateError, match="closed"):
        loop.complete([[1]], of(1))


def test_a_start_that_fails_is_told() -> None:
    def start() -> FakeServer:
        raise RuntimeError("no GPU left")

    with pytest.raises(RuntimeError, match="no GPU left"):
        RequestLoop("e0", start, FakeServer.stop)
