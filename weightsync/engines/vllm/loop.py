"""Runs vLLM's LLMEngine on one thread, which steps requests and runs commands between steps."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from weightsync.engines.base import Completion
from weightsync.errors import DeadlineError, EngineError, RankLostError, StateError, WeightSyncError

__all__ = ["EngineLoop", "Steppable"]

T = TypeVar("T")


class Steppable(Protocol):
    """The methods of vLLM's ``LLMEngine`` that are used here."""

    def add_request(self, request_id: str, prompt: object, params: object) -> object: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> Sequence[Any]: ...
    def reset_prefix_cache(self, reset_running_requests: bool = ...) -> bool: ...
    def sleep(self, level: int, mode: str) -> None: ...
    def wake_up(self, tags: list[str]) -> object: ...
    def collective_rpc(self, method: str, args: tuple[bytes, ...]) -> list[bytes]: ...


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    params: Any
    first: int | None = None
    tokens: list[int] = field(default_factory=list)
    done: Future[Completion] = field(default_factory=Future)


class EngineLoop:
    """Runs requests. Starts frozen and without a version. Methods may be called from any thread."""

    def __init__(self, name: str, start: Callable[[], Steppable], stop: Callable[[Steppable], None]) -> None:
        """Start the engine on its own thread, where `stop` ends it. Raises the errors of `start`."""
        self._name, self._stop = name, stop
        self._version: int | None = None
        self._frozen = True
        self._drained: Future[None] | None = None
        self._held: deque[_Request] = deque()
        self._running: dict[str, _Request] = {}
        self._numbers = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._ended: WeightSyncError | None = None
        self._lost: Future[RankLostError] = Future()
        started: Future[Steppable] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(start, started), name=f"engine-{name}", daemon=True
        )
        self._thread.start()
        self._engine = started.result()

    @property
    def frozen(self) -> bool:
        """Whether no request is stepped."""
        return self._frozen

    @property
    def serving(self) -> int:
        """The version that requests are admitted to; 0 while they are not."""
        return 0 if self._frozen or self._drained or self._version is None else self._version

    @property
    def num_held(self) -> int:
        """Number of requests that wait for `resume`."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait for the end of a step."""
        return self._commands.qsize()

    def call(self, work: Callable[[Steppable], T]) -> T:
        """Run `work` on the loop's thread between two steps."""
        return self._result(self._submit(lambda: work(self._engine)))

    def fail(self, lost: RankLostError) -> None:
        """Fail all calls, waiting and new ones, since a rank is lost. May be called once."""
        self._lost.set_result(lost)

    @property
    def is_lost(self) -> bool:
        """Whether the engine has lost a rank."""
        return self._lost.done()

    def require_ranks(self) -> None:
        """Raise RankLostError once the engine has failed."""
        if self.is_lost:
            raise RankLostError(*self._lost.result().args)

    def complete(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Completion]:
        """Run requests, batched with those of other callers. While frozen, they wait.

        Raises StateError before the first `resume` and after `close`, EngineError if vLLM fails.
        """
        requests = [_Request(list(prompt), each) for prompt, each in zip(prompts, params, strict=True)]
        self._result(self._submit(lambda: self._admit(requests)))
        return [self._result(request.done) for request in requests]

    def freeze(self, mode: str, timeout_s: float) -> None:
        """Stop stepping requests.

        Mode ``keep`` freezes running requests, ``wait`` lets them end, ``abort`` ends them at once. Raises
        DeadlineError; the loop then continues as before.
        """
        drained: Future[None] = Future()
        asked = self._submit(lambda: self._freeze(mode, drained))
        try:
            self._result(asked, timeout_s)
            self._result(drained, timeout_s)
        except FutureTimeoutError as error:
            if not asked.cancel() and not self._result(self._submit(self._undo_drain)):
                return  # drained since
            raise DeadlineError(f"pause ({mode})", (f"engine {self._name}",), timeout_s) from error

    def resume(self, version: int) -> None:
        """Serve `version`: drop caches of earlier weights, recompute frozen requests."""
        self._result(self._submit(lambda: self._resume(version)))

    def invalidate(self) -> None:
        """Refuse requests until `resume`: frozen ones, waiting ones and new ones."""
        self._result(self._submit(self._invalidate))

    def close(self, patience_s: float | None = None) -> bool:
        """End the engine and its thread; waiting calls get a StateError. Returns whether both ended."""
        self._closing = True
        self._commands.put(lambda: None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _result(self, future: Future[T], timeout_s: float | None = None) -> T:
        """Wait for `future`. Raises RankLostError if a rank is lost first, since vLLM may never answer."""
        either: tuple[Future[Any], ...] = (future, self._lost)
        wait(either, timeout_s, return_when=FIRST_COMPLETED)
        if not future.done():
            self.require_ranks()
        return future.result(0)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ended:
                future.set_exception(self._ended)
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's thread raises it
                future.set_exception(error)

        self.require_ranks()
        with self._lock:
            if self._ended:
                raise self._ended
            self._commands.put(run)
        return future

    def _run(self, start: Callable[[], Steppable], started: Future[Steppable]) -> None:
        try:
            engine = start()
        except BaseException as error:  # noqa: BLE001 - the constructor's thread raises it
            started.set_exception(error)
            return
        started.set_result(engine)
        ended: WeightSyncError = StateError(f"engine {self._name} is closed")
        try:
            while not self._closing:
                if self._frozen or not self._running:
                    self._commands.get()()
                while not self._commands.empty():
                    self._commands.get()()
                if self._running and not self._frozen:
                    self._step(engine)
        except Exception as error:  # noqa: BLE001 - the waiting callers' threads raise it
            ended = EngineError(self._name, "generate", f"{type(error).__name__}: {error}")
        finally:
            self._end(ended)
            self._stop(engine)

    def _step(self, engine: Steppable) -> None:
        assert self._version is not None
        for output in engine.step():
            request = self._running.get(output.request_id)
            if request is None:
                continue  # refused since
            request.tokens = list(output.outputs[0].token_ids)
            if request.tokens and request.first is None:
                request.first = self._version
            if output.finished:
                self._complete(output.request_id)
        if self._drained and not self._running:
            self._stop_stepping()

    def _complete(self, number: str, aborted: bool = False) -> None:
        assert self._version is not None
        request = self._running.pop(number)
        first = self._version if request.first is None else request.first
        request.done.set_result(Completion(request.tokens, (first, self._version), aborted))

    def _admit(self, requests: Sequence[_Request]) -> None:
        if self._version is None:
            raise StateError(f"engine {self._name} holds no committed version: update it first")
        if self._frozen or self._drained:
            self._held.extend(requests)
            return
        for request in requests:
            number = str(next(self._numbers))
            try:
                self._engine.add_request(
                    number, {"type": "token", "prompt_token_ids": request.prompt}, request.params
                )
            except ValueError as error:
                request.done.set_exception(EngineError(self._name, "generate", str(error)))
            else:
                self._running[number] = request

    def _freeze(self, mode: str, drained: Future[None]) -> None:
        self._drained = drained
        if mode == "abort" and not self._frozen:
            numbers = list(self._running)
            self._engine.abort_request(numbers)
            for number in numbers:
                self._complete(number, aborted=True)
        if self._frozen or mode == "keep" or not self._running:
            self._stop_stepping()

    def _stop_stepping(self) -> None:
        if not self._frozen:
            # If vLLM's core runs in its own process, it steps without being asked.
            self._engine.sleep(0, "keep")
            self._frozen = True
        if self._drained:
            self._drained.set_result(None)
            self._drained = None

    def _undo_drain(self) -> bool:
        if not self._drained:
            return False
        self._drained = None
        self._admit_held()
        return True

    def _resume(self, version: int) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.wake_up(["scheduling"])
        self._version, self._frozen = version, False
        self._admit_held()

    def _invalidate(self) -> None:
        self._version = None
        self._engine.abort_request(list(self._running))
        lost = StateError(f"engine {self._name} lost its version in a failed update: heal it first")
        for request in (*self._running.values(), *self._held):
            request.done.set_exception(lost)
        self._running.clear()
        self._held.clear()

    def _admit_held(self) -> None:
        held, self._held = self._held, deque()
        self._admit(held)

    def _end(self, ended: WeightSyncError) -> None:
        with self._lock:
            self._ended = ended
        while not self._commands.empty():
            self._commands.get()()
        for request in (*self._running.values(), *self._held):
            request.done.set_exception(ended)
