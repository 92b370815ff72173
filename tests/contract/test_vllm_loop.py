"""The thread that owns an LLMEngine, with a fake of it that makes a token per request and step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.patience import patient
from weightsync.engines.base import Completion
from weightsync.engines.vllm.loop import EngineLoop
from weightsync.errors import DeadlineError, EngineError, RankLostError, StateError

TIMEOUT_S = patient(10)


class FakeLlm:
    """`params` of a request is its number of tokens. Each step needs a permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.stepped = threading.Semaphore(0)
        self.left: dict[str, tuple[list[int], int]] = {}
        self.calls: list[str] = []
        self.stops = 0
        self.error: Exception | None = None

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: int) -> None:
        if not prompt["prompt_token_ids"]:
            raise ValueError("the prompt is empty")
        self.left[request_id] = ([], params)

    def step(self) -> list[SimpleNamespace]:
        assert self.permits.acquire(timeout=TIMEOUT_S)
        if self.error:
            raise self.error
        outputs = []
        for number, (tokens, wanted) in list(self.left.items()):
            tokens.append(len(tokens))
            finished = len(tokens) == wanted
            outputs.append(
                SimpleNamespace(
                    request_id=number, outputs=[SimpleNamespace(token_ids=tokens)], finished=finished
                )
            )
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

    def shut(self) -> None:
        self.stops += 1


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
def loop(llm: FakeLlm, threads: ThreadPoolExecutor) -> Iterator[EngineLoop]:
    """Closed before `threads` are, or a failed test would wait for them for ever."""
    loop = EngineLoop("e0", lambda: llm, FakeLlm.shut)
    yield loop
    llm.permits.release(1000)
    loop.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_wait_lets_running_requests_end_and_holds_new_ones(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], [3])
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    paused = threads.submit(loop.freeze, "wait", TIMEOUT_S)
    llm.permits.release(2)
    paused.result(TIMEOUT_S)
    assert loop.frozen
    assert running.result(TIMEOUT_S) == [Completion([0, 1, 2], (1, 1))]
    held = threads.submit(loop.complete, [[2]], [1])
    while not loop.call(lambda _: loop.num_held):
        assert not llm.left, "vLLM would run it as soon as it is woken"
    loop.resume(2)
    llm.permits.release()
    assert held.result(TIMEOUT_S) == [Completion([0], (2, 2))]


def test_keep_freezes_between_two_steps(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], [3])
    llm.permits.release()
    assert llm.stepped.acquire(timeout=TIMEOUT_S)
    paused = threads.submit(loop.freeze, "keep", TIMEOUT_S)
    llm.permits.release()  # the step that may have begun
    paused.result(TIMEOUT_S)
    assert llm.calls == ["reset True", "wake ['scheduling']", "sleep 0 keep"]
    assert not running.done()
    loop.resume(2)
    llm.permits.release(3)
    assert running.result(TIMEOUT_S) == [Completion([0, 1, 2], (1, 2))]
    assert llm.calls[3:] == ["reset True", "wake ['scheduling']"]


def test_a_drain_that_is_given_up_serves_on(llm, loop, threads) -> None:
    loop.resume(1)
    running = threads.submit(loop.complete, [[1]], [100])
    stop = threading.Event()

    def trickle() -> None:  # steps go on, but the request does not end in time
        while not stop.wait(0.005):
            if llm.left.get("0", ([], 0))[1] - len(llm.left.get("0", ([],))[0]) > 10:
                llm.permits.release()

    trickling = threads.submit(trickle)
    with pytest.raises(DeadlineError, match=r"pause \(wait\)"):
        loop.freeze("wait", 0.05)
    stop.set()
    trickling.result(TIMEOUT_S)
    assert not loop.frozen
    other = threads.submit(loop.complete, [[2]], [1])
    llm.permits.release(200)
    assert other.result(TIMEOUT_S)[0].tokens == [0]
    assert len(running.result(TIMEOUT_S)[0].tokens) == 100


def test_a_failed_step_ends_the_engine_for_everybody(llm, loop, threads) -> None:
    loop.resume(1)
    llm.error = RuntimeError("the device fell over")
    running = threads.submit(loop.complete, [[1]], [3])
    llm.permits.release()
    with pytest.raises(EngineError, match="the device fell over"):
        running.result(TIMEOUT_S)
    with pytest.raises(EngineError, match="the device fell over"):
        loop.complete([[1]], [1])


def test_a_refused_prompt_fails_alone(llm, loop) -> None:
    loop.resume(1)
    llm.permits.release(10)
    with pytest.raises(EngineError, match="the prompt is empty"):
        loop.complete([[]], [1])
    assert loop.complete([[1]], [1]) == [Completion([0], (1, 1))]


def test_close_wakes_who_waits(llm, loop, threads) -> None:
    loop.resume(1)
    loop.freeze("keep", TIMEOUT_S)
    held = threads.submit(loop.complete, [[1]], [1])
    loop.call(lambda _: None)
    loop.close()
    loop.close()
    with pytest.raises(StateError, match="closed"):
        held.result(TIMEOUT_S)
    assert llm.stops == 1


def test_whoever_waits_for_a_lost_rank_is_told_and_so_is_who_comes(llm, loop, threads) -> None:
    loop.resume(1)
    stuck = threading.Event()
    calling = threads.submit(loop.call, lambda _: stuck.wait(TIMEOUT_S))
    asked = [threads.submit(loop.complete, [[1]], [1]), threads.submit(loop.freeze, "keep", TIMEOUT_S)]
    loop.fail(RankLostError("e0", "watch", "killed", 1))
    for waiting in (calling, *asked):
        with pytest.raises(RankLostError, match="rank 1"):
            waiting.result(TIMEOUT_S)
    for call in (
        lambda: loop.resume(2),
        lambda: loop.complete([[1]], [1]),
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
        EngineLoop("e0", start, FakeLlm.shut)
