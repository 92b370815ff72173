"""Fakes of both engines under a `RequestLoop`: they make a token per request and permit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.patience import patient
from weightsync.engines.base import Completion
from weightsync.engines.serving.request_loop import Params, RequestLoop
from weightsync.engines.serving.server_thread import Made
from weightsync.engines.vllm.stepper import Stepper

TIMEOUT_S = patient(10)
T = TypeVar("T")


class FakeServer:
    """SGLang's: `params` of a request is its number of tokens: 0, 1, 2 and so on. Paused, it makes none."""

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
        params: int,
        on_made: Callable[[Made], object],
        salt: str,
    ) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        tokens: list[int] = []
        while len(tokens) < params:
            if name in self.aborted:
                on_made(made_of(tokens[-1:], "abort"))  # as SGLang tells of a request that waits
                return
            if self.paused or not self.permits.acquire(blocking=False):
                await asyncio.sleep(0.001)
                continue
            tokens.append(len(tokens))
            on_made(made_of(tokens, "length" if len(tokens) == params else ""))
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


def made(*segments: tuple[int, int], reason: str = "length") -> Completion:
    """A completion by the fake."""
    tokens = list(range(sum(number for _, number in segments)))
    return Completion(tokens, list(segments), [-float(token) for token in tokens], reason)


def made_of(tokens: Sequence[int], reason: str) -> Made:
    return Made(tokens, lambda: [-float(token) for token in tokens], reason)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline


class FakeLlm:
    """vLLM's: `params` of a request is its number of tokens. Each step needs a permit.

    `gives_up`: it ends each request with an error.
    """

    tokenizer = None

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.made = threading.Semaphore(0)
        self.left: dict[str, tuple[list[int], int]] = {}
        self.calls: list[str] = []
        self.salts: list[str | None] = []
        self.stops, self.gives_up, self.paused = 0, False, False
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
        if self.paused:
            return []
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
        self.made.release()
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(f"reset {reset_running_requests}")
        return True

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")
        self.paused = True

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")
        self.paused = False

    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> list[bytes]:
        return list(args)


def of(*nums_tokens: int, stops: tuple[int, ...] = ()) -> list[Params]:
    """Return the parameters of requests."""
    return [Params(num, frozenset(stops)) for num in nums_tokens]


def make(fake: FakeServer | FakeLlm, num_tokens: int) -> None:
    """Have each request make tokens."""
    for _ in range(num_tokens):
        fake.permits.release()
        assert fake.made.acquire(timeout=TIMEOUT_S)


def let(fake: FakeServer | FakeLlm, future: Future[T]) -> T:
    """Return a result for which an engine has to go on stepping."""
    while isinstance(fake, FakeLlm) and not future.done():
        fake.permits.release()
    return future.result(TIMEOUT_S)


def loop_of(fake: FakeServer | FakeLlm) -> RequestLoop:
    if isinstance(fake, FakeServer):
        return RequestLoop("e0", lambda: fake, FakeServer.stop)
    return RequestLoop("e0", lambda: Stepper(fake), stop)


def stop(stepper: Stepper) -> None:
    stepper.release().stops += 1
