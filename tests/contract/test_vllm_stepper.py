"""The thread that owns and steps an LLMEngine, with a fake that makes a token per request and step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import patient
from weightsync.engines.base import Completion
from weightsync.engines.serving.request_loop import Params, RequestLoop
from weightsync.engines.vllm.stepper import Stepper
from weightsync.errors import DeadlineError, EngineError, RankLostError, StateError

TIMEOUT_S = patient(10)


class FakeLlm:
    """`params` of a request is its number of tokens. Each step needs a permit.

    `gives_up`: it ends each request with an error.
    """

    tokenizer = None

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.stepped = threading.Semaphore(0)
        self.left: dict[str, tuple[list[int], int]] = {}
        self.calls: list[str] = []
        self.salts: list[str | None] = []
        self.stops, self.gives_up = 0, False
        self.error: Exception | None = None

    def add_request(self, request_id: str, prompt: dict[str, Any], params: int) -> None:
        if not prompt["prompt_token_ids"]:
            raise ValueError("the prompt is empty")
        self.left[request_id] = ([], params)
        self.salts.append(prompt.get("cache_salt"))

    def abort_request(self, request_ids: list[str]) -> None:
        for number in request_ids:
            self.left.pop(number, None)

    def step(self) -> list[SimpleNamespace]:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if self.error:
            raise self.error
        outputs = []
        for number, (tokens, wanted) in list(self.left.items()):
            tokens.append(len(tokens))
            finished = len(tokens) == wanted
            reason = "error" if self.gives_up else "length" if finished else None
            logprobs = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
            said = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=number, outputs=[said], finished=bool(reason)))
            if finished:
                del self.left[number]
        self.stepped.release()
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(f"reset {reset_running_requests}")
        return True

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")

    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> list[bytes]:
        return list(args)


def stop(stepper: Stepper) -> None:
    stepper.release().stops += 1


def made(*segments: tuple[int, int], reason: str = "length") -> Completion:
    """A completion by the fake."""
    tokens = list(range(sum(number for _, number in segments)))
    return Completion(tokens, list(segments), [-float(token) for token in tokens], reason)


def of(*nums_tokens: int) -> list[Params]:
    return [Params(num) for num in nums_tokens]


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def loop(llm: FakeLlm, threads: ThreadPoolExecutor) -> Iterator[RequestLoop]:
    """Closed before `threads` are, or a failed test would wait for them for ever."""
    loop = RequestLoop("e0", lambda: Stepper(llm), stop)
    yield loop
    llm.permits.release(1000)
    loop.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_wait_lets_running_requests_end_and_holds_new_ones(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    paused = threads.submit(loop.freeze, "wait", TIMEOUT_S)
    llm.permits.release(2)
    paused.result(TIMEOUT_S)
    assert loop.frozen
    assert running.result(TIMEOUT_S) == [made((1, 3))]
    held = threads.submit(loop.complete, [[2]], of(1))
    while not loop.num_held:
        assert not llm.left, "vLLM would run it as soon as it is woken"
    loop.resume(2)
    llm.permits.release()
    assert held.result(TIMEOUT_S) == [made((2, 1))]


def test_a_call_of_which_one_prompt_fails_leaves_no_request_behind(llm, loop) -> None:
    loop.resume(1)
    with pytest.raises(EngineError, match="the prompt is empty"):
        loop.complete([[1], [], [2]], of(1, 1, 1))
    assert llm.left == {}
    llm.permits.release(2)
    assert loop.complete([[3]], of(2)) == [made((1, 2))]


def test_keep_freezes_between_two_steps(llm, loop, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    asked, call = threading.Event(), loop.server.loop.call_soon_threadsafe

    def noted(*args: object, **named: object) -> object:
        handle = call(*args, **named)
        asked.set()
        return handle

    monkeypatch.setattr(loop.server.loop, "call_soon_threadsafe", noted)
    paused = threads.submit(loop.freeze, "keep", TIMEOUT_S)
    assert asked.wait(TIMEOUT_S)  # else a third step could begin before it
    llm.permits.release()  # the step that may have begun
    paused.result(TIMEOUT_S)
    assert llm.calls == ["sleep 0 keep", "wake ['scheduling']", "sleep 0 keep"]
    assert not running.done()
    loop.resume(2)
    llm.permits.release(3)
    # The second token is of the step that may have begun.
    assert running.result(TIMEOUT_S)[0] in (made((1, 1), (2, 2)), made((1, 2), (2, 1)))
    assert llm.calls[3:] == ["reset True", "wake ['scheduling']"]


def test_caches_are_dropped_only_if_requests_may_have_left_something(llm, loop) -> None:
    def next_version(version: int) -> int:
        loop.freeze("keep", TIMEOUT_S)
        loop.resume(version)
        return llm.calls.count("reset True")

    loop.resume(1)
    assert next_version(2) == 0
    llm.permits.release()
    loop.complete([[1]], of(1))
    assert [next_version(version) for version in (3, 4)] == [1, 1]
    loop.has_cached = True  # as a request does that comes by another way
    assert [next_version(version) for version in (5, 6)] == [2, 2]


def test_a_frozen_request_is_recomputed_and_then_caches_again(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(1 << 20))
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    for version in (2, 3):
        paused = threads.submit(loop.freeze, "keep", TIMEOUT_S)
        while not paused.done():
            llm.permits.release()  # for a step that may have begun
        paused.result(TIMEOUT_S)
        loop.resume(version)
    assert llm.calls.count("reset True") == 2
    assert not running.done()


def test_requests_carry_the_salt_of_the_commit_before_them(llm, loop) -> None:
    """The same version number, committed again, is another salt; what serves on keeps its own."""
    llm.permits.release(100)
    for version, caches in ((1, "drop"), (2, "salt"), (2, "keep"), (2, "salt"), (3, "drop")):
        loop.freeze("keep", TIMEOUT_S)
        loop.resume(version, caches)
        loop.complete([[1]], of(1))
    none, first, kept, second, dropped = llm.salts
    assert (none, dropped, kept) == (None, None, first)
    assert first
    assert second
    assert first != second
    assert llm.calls.count("reset True") == 1, "only the last commit drops"


def test_a_drain_that_is_given_up_serves_on(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(100))
    stop = threading.Event()

    def trickle() -> None:  # steps go on, but the request does not end in time
        while not stop.wait(0.005):
            if llm.left.get("e0-0-", ([], 0))[1] - len(llm.left.get("e0-0-", ([],))[0]) > 10:
                llm.permits.release()

    trickling = threads.submit(trickle)
    with pytest.raises(DeadlineError, match=r"pause \(wait\)"):
        loop.freeze("wait", 0.05)
    stop.set()
    trickling.result(TIMEOUT_S)
    assert not loop.frozen
    other = threads.submit(loop.complete, [[2]], of(1))
    llm.permits.release(200)
    assert other.result(TIMEOUT_S)[0].tokens == [0]
    assert len(running.result(TIMEOUT_S)[0].tokens) == 100


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_that_is_given_up_within_a_step_changes_nothing(llm, loop, threads, mode: str) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(3))
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    with pytest.raises(DeadlineError, match=rf"pause \({mode}\)"):
        loop.freeze(mode, 0.01)
    llm.permits.release(2)
    assert running.result(TIMEOUT_S) == [made((1, 3))]
    assert (loop.frozen, loop.serving) == (False, 1)


def test_abort_ends_running_requests_with_what_they_have(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], of(1 << 20))
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    paused = threads.submit(loop.freeze, "abort", TIMEOUT_S)
    while not paused.done():
        llm.permits.release()
    paused.result(TIMEOUT_S)
    (completion,) = running.result(TIMEOUT_S)
    assert completion == made((1, len(completion.tokens)), reason="abort")
    assert completion.tokens
    assert not llm.left


def test_a_failed_step_ends_the_engine_for_everybody(llm, loop, threads) -> None:
    loop.resume(1)
    llm.error = RuntimeError("the device fell over")
    running = threads.submit(loop.complete, [[1]], of(3))
    llm.permits.release()
    with pytest.raises(EngineError, match="the device fell over"):
        running.result(TIMEOUT_S)
    with pytest.raises(EngineError, match="the device fell over"):
        loop.complete([[1]], of(1))


def test_a_refused_prompt_fails_alone(llm, loop) -> None:
    loop.resume(1)
    llm.permits.release(10)
    with pytest.raises(EngineError, match="the prompt is empty"):
        loop.complete([[]], of(1))
    assert loop.complete([[1]], of(1)) == [made((1, 1))]


def test_a_request_that_vllm_gives_up_is_an_error_and_no_short_answer(llm, loop) -> None:
    loop.resume(1)
    llm.gives_up = True
    llm.permits.release()
    with pytest.raises(EngineError, match="vLLM gave the request up"):
        loop.complete([[1]], of(3))
    llm.gives_up = False
    llm.permits.release()
    assert loop.complete([[1]], of(1)) == [made((1, 1))]


def test_close_wakes_who_waits(llm, loop, threads) -> None:
    loop.resume(1)
    loop.freeze("keep", TIMEOUT_S)
    held = threads.submit(loop.complete, [[1]], of(1))
    while not loop.num_held:
        assert not held.done()
    loop.close()
    loop.close()
    with pytest.raises(StateError, match="closed"):
        held.result(TIMEOUT_S)
    assert llm.stops == 1


def test_whoever_waits_for_a_lost_rank_is_told_and_so_is_who_comes(llm, loop, threads) -> None:
    loop.resume(1)
    hangs, stuck = threading.Event(), threading.Event()

    async def hang(_: Stepper) -> None:
        hangs.set()
        stuck.wait(TIMEOUT_S)

    calling = threads.submit(loop.call, hang)
    asked = [threads.submit(loop.complete, [[1]], of(1)), threads.submit(loop.freeze, "keep", TIMEOUT_S)]
    assert hangs.wait(TIMEOUT_S)
    loop.fail(RankLostError("e0", "watch", "killed", 1))
    for waiting in (calling, *asked):
        with pytest.raises(RankLostError, match="rank 1"):
            waiting.result(TIMEOUT_S)
    for call in (
        lambda: loop.resume(2),
        lambda: loop.complete([[1]], of(1)),
        loop.require_ranks,
        loop.invalidate,
    ):
        with pytest.raises(RankLostError, match="rank 1"):
            call()
    assert not loop.close(0.01)
    assert llm.stops == 0
    stuck.set()
    assert loop.close(TIMEOUT_S)
    assert llm.stops == 1


def test_a_start_that_fails_is_raised_here() -> None:
    def start() -> FakeLlm:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        RequestLoop("e0", lambda: Stepper(start()), stop)
