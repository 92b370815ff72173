"""The thread that owns an engine's event loop, with fakes of both engines.

`test_engines.py` runs it with the engines themselves.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from tests.contract.request_loops import TIMEOUT_S, FakeLlm, FakeServer, let, made, make, of, until
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.errors import EngineError, RankLostError, StateError

Fake = FakeServer | FakeLlm


@pytest.fixture(params=[FakeServer, FakeLlm], ids=["sglang", "vllm"])
def fake(request: pytest.FixtureRequest) -> Fake:
    fake: Fake = request.param()
    return fake


def test_wait_lets_running_requests_end_and_holds_new_ones(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    make(fake, 1)
    frozen = threads.submit(loop.freeze, "wait", TIMEOUT_S)
    if isinstance(fake, FakeServer):  # vLLM only looks at calls between two steps
        until(lambda: loop.serving == 0)
        held = threads.submit(loop.complete, [[1]], of(1))
    make(fake, 2)
    frozen.result(TIMEOUT_S)
    assert loop.frozen
    assert running.result(TIMEOUT_S) == [made((1, 3))]
    if isinstance(fake, FakeLlm):
        held = threads.submit(loop.complete, [[2]], of(1))
        until(lambda: loop.num_held == 1)
        assert not fake.left, "vLLM would run it as soon as it is woken"
    assert not held.done()
    loop.resume(2)
    make(fake, 1)
    assert held.result(TIMEOUT_S) == [made((2, 1))]


def test_abort_ends_running_requests_with_what_they_have(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(1 << 20))
    make(fake, 3)
    let(fake, threads.submit(loop.freeze, "abort", TIMEOUT_S))
    (completion,) = running.result(TIMEOUT_S)
    assert completion == made((1, len(completion.tokens)), reason="abort")
    assert len(completion.tokens) == 3 or isinstance(fake, FakeLlm), "vLLM may have begun a step"
    assert len(completion.tokens) >= 3
    assert not getattr(fake, "left", None)


def test_a_refused_prompt_fails_alone_and_names_the_engine(fake, loop, threads) -> None:
    loop.resume(1)
    with pytest.raises(EngineError, match="e0 failed in generate: ValueError: the prompt is empty"):
        loop.complete([[]], of(1))
    later = threads.submit(loop.complete, [[1]], of(1))
    make(fake, 1)
    assert later.result(TIMEOUT_S) == [made((1, 1))]


def test_all_are_told_of_a_lost_rank_and_of_the_end(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(5))
    make(fake, 1)
    loop.thread.fail(RankLostError("e0", "watch", "its process 7 ended", 1))
    with pytest.raises(RankLostError, match="rank 1"):
        running.result(TIMEOUT_S)
    for ask in (
        loop.thread.require_ranks,
        loop.invalidate,
        lambda: loop.resume(2),
        lambda: loop.freeze("keep", TIMEOUT_S),
        lambda: loop.complete([[1]], of(1)),
    ):
        with pytest.raises(RankLostError, match="rank 1"):
            ask()
    fake.permits.release()  # for a step that has begun
    assert loop.thread.close(TIMEOUT_S)
    assert loop.thread.close(TIMEOUT_S)
    assert fake.stops == 1


@pytest.mark.parametrize("is_held", [False, True], ids=["running", "held"])
def test_closing_tells_who_waits(is_held: bool, fake, loop, threads) -> None:
    loop.resume(1)
    if is_held:
        loop.freeze("keep", TIMEOUT_S)
    waiting = threads.submit(loop.complete, [[1]], of(1 << 20))
    if is_held:
        until(lambda: loop.num_held == 1)
    else:
        make(fake, 1)
    assert let(fake, threads.submit(loop.thread.close, TIMEOUT_S))
    assert loop.thread.close(TIMEOUT_S)
    with pytest.raises(StateError, match="closed"):
        waiting.result(TIMEOUT_S)
    with pytest.raises(StateError, match="closed"):
        loop.complete([[1]], of(1))
    assert fake.stops == 1


def test_all_are_turned_away_after_a_failed_update(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(1 << 20))
    make(fake, 1)
    let(fake, threads.submit(loop.freeze, "keep", TIMEOUT_S))
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
    fake.permits.release()
    assert late.result(TIMEOUT_S) == [made((2, 1))]


def test_a_call_may_be_given_up(fake, loop) -> None:
    going_on = threading.Event()

    async def slow(_: object) -> None:
        while not going_on.is_set():
            await asyncio.sleep(0.001)

    with pytest.raises(FutureTimeoutError):
        loop.call(slow, 0.01)
    going_on.set()
    loop.resume(1)
    assert loop.serving == 1


def test_a_start_that_fails_is_told() -> None:
    def start() -> FakeServer:
        raise RuntimeError("no GPU left")

    with pytest.raises(RuntimeError, match="no GPU left"):
        RequestLoop("e0", start, FakeServer.stop)
