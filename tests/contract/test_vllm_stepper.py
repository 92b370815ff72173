"""The thread that owns and steps an LLMEngine, with a fake that makes a token per request and step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from types import SimpleNamespace

import pytest

from tests.contract.request_loops import TIMEOUT_S, FakeLlm, loop_of, made, make, of
from weightsync.engines.serving.request_loop import RequestLoop
from weightsync.engines.vllm.stepper import Stepper
from weightsync.errors import DeadlineError, EngineError, RankLostError


@pytest.fixture
def fake() -> FakeLlm:
    return FakeLlm()


def test_a_call_of_which_one_prompt_fails_leaves_no_request_behind(fake, loop) -> None:
    loop.resume(1)
    with pytest.raises(EngineError, match="the prompt is empty"):
        loop.complete([[1], [], [2]], of(1, 1, 1))
    assert fake.left == {}
    fake.permits.release(2)
    assert loop.complete([[3]], of(2)) == [made((1, 2))]


def freeze(fake: FakeLlm, loop: RequestLoop, threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze requests between two steps. One more may begin before it."""
    asked, call = threading.Event(), loop.server.loop.call_soon_threadsafe

    def noted(*args: object, **named: object) -> object:
        handle = call(*args, **named)
        asked.set()
        return handle

    monkeypatch.setattr(loop.server.loop, "call_soon_threadsafe", noted)
    paused = threads.submit(loop.freeze, "keep", TIMEOUT_S)
    assert asked.wait(TIMEOUT_S)  # else a third step could begin before it
    fake.permits.release()  # the step that may have begun
    paused.result(TIMEOUT_S)


def test_keep_freezes_between_two_steps(fake, loop, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    make(fake, 1)
    freeze(fake, loop, threads, monkeypatch)
    assert fake.calls == ["sleep 0 keep", "wake ['scheduling']", "sleep 0 keep"]
    assert not running.done()
    loop.resume(2)
    fake.permits.release(3)
    # The second token is of the step that may have begun.
    assert running.result(TIMEOUT_S)[0] in (made((1, 1), (2, 2)), made((1, 2), (2, 1)))
    assert fake.calls[3:] == ["reset True", "wake ['scheduling']"]


class Ahead(FakeLlm):
    """Has a step more in flight, as vLLM with asynchronous scheduling."""

    flight: Sequence[SimpleNamespace] = ()

    def step(self) -> list[SimpleNamespace]:
        came, self.flight = self.flight, super().step()
        for each in self.flight:
            each.outputs[0].token_ids = [*each.outputs[0].token_ids]
        return [*came]


def test_tokens_of_a_step_in_flight_have_the_version_of_its_weights(threads, monkeypatch) -> None:
    fake = Ahead()
    loop = loop_of(fake)
    loop.resume(1, "salt")
    running = threads.submit(loop.complete, [[1]], of(9))
    make(fake, 3)
    freeze(fake, loop, threads, monkeypatch)
    ((tokens, _),) = fake.left.values()
    launched = len(tokens)
    loop.resume(2, "salt")
    fake.permits.release(9)
    assert running.result(TIMEOUT_S) == [made((1, launched), (2, 9 - launched))]
    assert loop.thread.close(TIMEOUT_S)


def test_caches_are_dropped_only_if_requests_may_have_left_something(fake, loop) -> None:
    def next_version(version: int) -> int:
        loop.freeze("keep", TIMEOUT_S)
        loop.resume(version)
        return fake.calls.count("reset True")

    loop.resume(1)
    assert next_version(2) == 0
    fake.permits.release()
    loop.complete([[1]], of(1))
    assert [next_version(version) for version in (3, 4)] == [1, 1]
    loop.has_cached = True  # as a request does that comes by another way
    assert [next_version(version) for version in (5, 6)] == [2, 2]


def test_a_frozen_request_is_recomputed_and_then_caches_again(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(1 << 20))
    fake.permits.release()
    assert fake.made.acquire(timeout=TIMEOUT_S)
    for version in (2, 3):
        paused = threads.submit(loop.freeze, "keep", TIMEOUT_S)
        while not paused.done():
            fake.permits.release()  # for a step that may have begun
        paused.result(TIMEOUT_S)
        loop.resume(version)
    assert fake.calls.count("reset True") == 2
    assert not running.done()


def test_requests_carry_the_salt_of_the_commit_before_them(fake, loop) -> None:
    """The same version number, committed again, is another salt; what serves on keeps its own."""
    fake.permits.release(100)
    for version, caches in ((1, "drop"), (2, "salt"), (2, "keep"), (2, "salt"), (3, "drop")):
        loop.freeze("keep", TIMEOUT_S)
        loop.resume(version, caches)
        loop.complete([[1]], of(1))
    none, first, kept, second, dropped = fake.salts
    assert (none, dropped, kept) == (None, None, first)
    assert first
    assert second
    assert first != second
    assert fake.calls.count("reset True") == 1, "only the last commit drops"


def test_a_drain_that_is_given_up_serves_on(fake, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(100))
    stop = threading.Event()

    def trickle() -> None:  # steps go on, but the request does not end in time
        while not stop.wait(0.005):
            if fake.left.get("e0-0-", ([], 0))[1] - len(fake.left.get("e0-0-", ([],))[0]) > 10:
                fake.permits.release()

    trickling = threads.submit(trickle)
    with pytest.raises(DeadlineError, match=r"pause \(wait\)"):
        loop.freeze("wait", 0.05)
    stop.set()
    trickling.result(TIMEOUT_S)
    assert not loop.frozen
    other = threads.submit(loop.complete, [[2]], of(1))
    fake.permits.release(200)
    assert other.result(TIMEOUT_S)[0].tokens == [0]
    assert len(running.result(TIMEOUT_S)[0].tokens) == 100


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_that_is_given_up_within_a_step_changes_nothing(fake, loop, threads, mode: str) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    fake.permits.release()
    assert fake.made.acquire(timeout=TIMEOUT_S)
    with pytest.raises(DeadlineError, match=rf"pause \({mode}\)"):
        loop.freeze(mode, 0.01)
    fake.permits.release(2)
    assert running.result(TIMEOUT_S) == [made((1, 3))]
    assert (loop.frozen, loop.serving) == (False, 1)


def test_a_failed_step_ends_the_engine_for_everybody(fake, loop, threads) -> None:
    loop.resume(1)
    fake.error = RuntimeError("the device fell over")
    running = threads.submit(loop.complete, [[1]], of(3))
    fake.permits.release()
    with pytest.raises(EngineError, match="the device fell over"):
        running.result(TIMEOUT_S)
    with pytest.raises(EngineError, match="the device fell over"):
        loop.complete([[1]], of(1))


def test_a_request_that_vllm_gives_up_is_an_error_and_no_short_answer(fake, loop) -> None:
    loop.resume(1)
    fake.gives_up = True
    fake.permits.release()
    with pytest.raises(EngineError, match="vLLM gave the request up"):
        loop.complete([[1]], of(3))
    fake.gives_up = False
    fake.permits.release()
    assert loop.complete([[1]], of(1)) == [made((1, 1))]


def test_whoever_waits_for_a_lost_rank_is_told_also_during_a_call(fake, loop, threads) -> None:
    loop.resume(1)
    hangs, stuck = threading.Event(), threading.Event()

    async def hang(_: Stepper) -> None:
        hangs.set()
        stuck.wait(TIMEOUT_S)

    calling = threads.submit(loop.call, hang)
    asked = [threads.submit(loop.complete, [[1]], of(1)), threads.submit(loop.freeze, "keep", TIMEOUT_S)]
    assert hangs.wait(TIMEOUT_S)
    loop.thread.fail(RankLostError("e0", "watch", "killed", 1))
    for waiting in (calling, *asked):
        with pytest.raises(RankLostError, match="rank 1"):
            waiting.result(TIMEOUT_S)
    assert not loop.thread.close(0.01)
    assert fake.stops == 0
    stuck.set()
    assert loop.thread.close(TIMEOUT_S)
    assert fake.stops == 1
