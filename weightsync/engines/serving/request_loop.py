"""Runs an engine and an event loop on one thread, which serves requests and awaits calls."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Literal

from weightsync.engines.base import Completion, Segments
from weightsync.engines.serving.server_thread import Made, S, ServerThread, T
from weightsync.errors import DeadlineError, EngineError, StateError, WeightSyncError

CacheStep = Literal["keep", "drop", "salt"]
"""The treatment of cached prefixes and of frozen requests' caches at a resume.

``keep``: the weights are the same. ``drop``: all caches are dropped, and frozen requests recomputed.
``salt``: new requests do not hit earlier prefixes, and frozen requests continue on their caches.
"""

_ANSWER_S = 0.2
"""Time for the thread to say itself that a pause came too late."""


@dataclass(frozen=True, slots=True)
class Params:
    """The engine's own `settings` of a request, and the tokens that end it, if the engine does not stop."""

    settings: Any
    stops: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _Request:
    prompt: list[int]
    params: Params
    call: list[_Request]
    tokens: list[int] = field(default_factory=list)
    segments: Segments = field(default_factory=list)
    logprobs: Callable[[], list[float]] = list
    finish_reason: str = ""
    aborted: bool = False
    stopped: bool = False
    done: Future[Completion] = field(default_factory=Future)

    def append(self, made: Made, version: int) -> bool:
        """Store all tokens so far; new tokens are of `version`. Returns True after a stop token."""
        if not self.stopped:
            self._append(made, version)
        if made.versions:
            self.segments = _as_made(self.segments, made.versions)
        return self.stopped

    def _append(self, made: Made, version: int) -> None:
        # There may be fewer tokens than before if the request was aborted as it waited.
        new = made.tokens[len(self.tokens) :]
        stop = next((i for i, token in enumerate(new, 1) if token in self.params.stops), None)
        self.finish_reason = made.finish_reason if stop is None else "stop"
        if new := new[:stop]:
            self.tokens.extend(new)
            self.logprobs = made.logprobs
            before = self.segments.pop()[1] if self.segments and self.segments[-1][0] == version else 0
            self.segments.append((version, before + len(new)))
        self.stopped = stop is not None

    def end(self, version: int) -> None:
        """Complete the request, unless it has ended. `version` is the one of no tokens."""
        if not self.done.done():
            # If the engine has not ended it, it was aborted.
            reason, logprobs = self.finish_reason or "abort", self.logprobs()[: len(self.tokens)]
            self.done.set_result(Completion(self.tokens, self.segments or [(version, 0)], logprobs, reason))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class RequestLoop:
    """Runs requests. Starts frozen and without a version. Methods may be called from any thread.

    Attributes:
        frozen: whether no request runs.
        has_cached: whether requests may have filled caches since the last drop. Set it if requests come by
            another way.
        thread: the engine's thread.
        server: the result of `start`. Use it only on that thread, see `call`.
    """

    def __init__(self, name: str, start: Callable[[], S], stop: Callable[[S], None]) -> None:
        """Start the engine on a new thread, where `stop` ends it. Raises the errors of `start`."""
        self._name = name
        self._version: int | None = None
        # Shut: requests are held. Frozen: none runs.
        self._shut = self.frozen = True
        self.has_cached, self._salt = False, ""
        self._held: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._quiet, self._turn = asyncio.Event(), asyncio.Lock()
        self._quiet.set()
        self.thread = thread = ServerThread(name, start, stop, self._fail)
        self._result, self._submit = thread.result, thread.submit
        self.server = thread.server
        self._result(self._submit(self.server.pause("retract")))

    @property
    def num_running(self) -> int:
        """Number of requests that the engine has, frozen or not."""
        return len(self._running)

    @property
    def num_held(self) -> int:
        """Number of requests that wait for `resume`."""
        return len(self._held)

    @property
    def serving(self) -> int:
        """The version that requests are admitted to; 0 while they are not."""
        return 0 if self._shut or self._version is None else self._version

    def call(self, work: Callable[[Any], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """Await `work` on the loop, with the server, while no request is stepped.

        Raises FutureTimeoutError; the work then continues.
        """
        return self._result(self._submit(self._alone(work)), timeout_s)

    def complete(self, prompts: Sequence[Sequence[int]], params: Sequence[Params]) -> list[Completion]:
        """Run requests, together with other callers' requests. While frozen, requests wait.

        If a request fails, the other requests of the call are ended before this raises.

        Raises StateError before the first `resume` and after `close`, EngineError if the engine fails.
        """
        requests: list[_Request] = []
        requests += [
            _Request(list(prompt), each, requests) for prompt, each in zip(prompts, params, strict=True)
        ]
        self._result(self._submit(self._admit(requests)))
        return [self._result(request.done) for request in requests]

    def freeze(self, mode: str, timeout_s: float) -> None:
        """Stop running requests: ``keep`` freezes them, ``wait`` lets them end, ``abort`` ends them early.

        Raises DeadlineError; requests then continue as before.
        """
        begun: Future[None] = Future()
        asked = self._submit(self._freeze(mode, timeout_s, begun))
        try:
            self._result(asked, timeout_s + _ANSWER_S)
        except FutureTimeoutError as error:  # the thread is in a step
            if begun.cancel():
                raise _too_late(mode, self._name, timeout_s) from error
            self._result(asked)

    def undo_freeze(self) -> None:
        """Undo a `freeze`: continue with the same version."""
        self._result(self._submit(self._go_on()))

    def resume(self, version: int, caches: CacheStep = "drop") -> None:
        """Serve `version`, after treating `caches`. Raises EngineError if the engine does not drop caches."""
        self._result(self._submit(self._resume(version, caches)))

    def invalidate(self) -> None:
        """Refuse requests until `resume`: frozen ones, waiting ones and new ones."""
        self._result(self._submit(self._invalidate()))

    def _fail(self, error: WeightSyncError) -> None:
        for request in (*self._running.values(), *self._held):
            request.fail(error)

    async def _alone(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            if self.frozen:
                return await work(self.server)
            # Without a pause, SGLang would wait for running requests and admit no others.
            await self.server.pause("in_place")
            try:
                return await work(self.server)
            finally:
                await self.server.go_on()

    async def _admit(self, requests: Sequence[_Request]) -> None:
        if self._version is None:
            raise StateError(f"engine {self._name} holds no committed version: update it first")
        if self._shut:
            self._held.extend(requests)
            return
        for request in requests:
            # No name is a prefix of another, since SGLang aborts by prefix.
            name = f"{self._name}-{next(self._numbers)}-"
            self._running[name] = request
            self._quiet.clear()
            task = asyncio.create_task(self._serve(name, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, name: str, request: _Request) -> None:
        def append(made: Made) -> None:
            if not request.done.done() and request.append(made, self._of_now()):
                self._abort(name)  # the end of the stream ends the request: it may say versions

        try:
            if not request.aborted:
                self.has_cached = True
                await self.server.run(name, request.prompt, request.params.settings, append, self._salt)
            request.end(self._of_now())
        except Exception as error:  # noqa: BLE001 - the waiting caller's thread raises it
            failed = EngineError(self._name, "generate", f"{type(error).__name__}: {error}")
            if self.server.broken:
                self.thread.end(failed)
            elif not request.aborted:
                others = (item for item in self._running.items() if item[1] is not request)
                self._abort(*[other for other, each in others if each.call is request.call])
            for each in request.call:
                each.fail(failed)
        finally:
            del self._running[name]
            if not self._running:
                self._quiet.set()

    def _of_now(self) -> int:
        return self._version or 0  # without a version, requests get an error instead

    async def _freeze(self, mode: str, timeout_s: float, begun: Future[None]) -> None:
        if self.frozen or begun.cancelled():
            return
        self._shut = True
        if mode == "abort":
            self._abort(*self._running)
        if mode != "keep":
            try:
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
            except TimeoutError as error:
                await self._open()
                raise _too_late(mode, self._name, timeout_s) from error
        if not begun.set_running_or_notify_cancel():
            await self._open()
            return
        async with self._turn:
            await self.server.pause("retract")
            self.frozen = True

    async def _resume(self, version: int, caches: CacheStep) -> None:
        if caches == "drop":
            await self._drop_caches()
        elif caches == "salt":
            # The version does not suffice: another run may serve other weights under the same number.
            self._salt = f"{version}-{uuid.uuid4().hex}"
        self._version = version
        await self._go_on()

    async def _drop_caches(self) -> None:
        if self.server.forgets and self.has_cached:
            if not await self.server.forget():
                raise EngineError(self._name, "commit", "the engine keeps what earlier weights cached")
            self.has_cached = bool(self._running)
        self._salt = ""

    async def _go_on(self) -> None:
        async with self._turn:
            self.frozen = False
            await self.server.go_on()
        await self._open()

    async def _open(self) -> None:
        self._shut = False
        held, self._held = self._held, []
        await self._admit(held)

    async def _invalidate(self) -> None:
        self._version = None
        lost = StateError(f"engine {self._name} lost its version in a failed update: heal it first")
        self._fail(lost)
        self._held.clear()
        self._abort(*self._running)

    def _abort(self, *names: str) -> None:
        for name in names:
            if not self._running[name].aborted:
                self._running[name].aborted = True
                self.server.abort(name)


def _as_made(segments: Segments, versions: Sequence[int]) -> Segments:
    """Return `segments`, with earlier `versions` of tokens that came after the next version began."""
    came = [version for version, count in segments for _ in range(count)]
    made = [*map(min, came, versions), *came[len(versions) :]]
    return [(version, len([*same])) for version, same in itertools.groupby(made)]


def _too_late(mode: str, engine: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(f"pause ({mode})", (f"engine {engine}",), timeout_s)
