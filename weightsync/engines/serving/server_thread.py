"""One thread with an engine and an event loop, on which calls to the engine are awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from weightsync.engines.serving.texts import Tokenizer
from weightsync.errors import RankLostError, StateError, WeightSyncError

T = TypeVar("T")
S = TypeVar("S", bound="AsyncServer")


@dataclass(frozen=True, slots=True)
class Made:
    """All that an engine has made of a request so far.

    Attributes:
        logprobs: returns the log-probabilities of `tokens`.
        finish_reason: why it ended, see `Rollout`; empty while it runs.
        versions: the version of each token, if the engine says so at the end.
    """

    tokens: Sequence[int]
    logprobs: Callable[[], list[float]]
    finish_reason: str = ""
    versions: Sequence[int] = ()


class AsyncServer(Protocol):
    """An inference engine with coroutines. Callers await them on `loop`.

    Attributes:
        forgets: whether `forget` works while requests are frozen.
        broken: whether the engine will never make tokens again.
        tokenizer: the engine's own, if it has one. Any thread may use it.
    """

    loop: asyncio.AbstractEventLoop
    forgets: bool
    broken: bool
    tokenizer: Tokenizer | None

    async def run(
        self,
        name: str,
        prompt: Sequence[int],
        params: Any,  # noqa: ANN401 - the engine's
        on_made: Callable[[Made], object],
        salt: str,
    ) -> None:
        """Run a request until it ends. Calls `on_made` whenever there are more tokens, and at the end.

        The request only hits prefixes that requests of the same `salt` cached; "" is without a salt. A server
        that is never resumed with ``salt`` may ignore it.
        """

    def abort(self, name: str) -> None: ...

    async def pause(self, mode: str) -> None:
        """Make no tokens: ``retract`` before weights change, ``in_place`` for a call."""

    async def go_on(self) -> None: ...
    async def forget(self) -> bool: ...


class ServerThread:
    """The thread, until the engine ends. Methods may be called from any thread.

    Attributes:
        server: the result of `start`. Use it only on the loop.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], S],
        stop: Callable[[S], None],
        when_ended: Callable[[WeightSyncError], None],
    ) -> None:
        """Start the engine, as `RequestLoop`. The thread calls `when_ended` before `stop`."""
        self._name, self._when_ended = name, when_ended
        self._lost: Future[RankLostError] = Future()
        self._ended: WeightSyncError | None = None
        self._lock = threading.Lock()
        started: Future[AsyncServer] = Future()
        # The thread runs until the engine's processes have ended, since they would end with it.
        self._thread = threading.Thread(
            target=self._run, args=(start, stop, started), name=f"engine-{name}", daemon=True
        )
        self._thread.start()
        self.server = started.result()

    @property
    def is_lost(self) -> bool:
        """Return True if the engine has lost a rank."""
        return self._lost.done()

    def fail(self, lost: RankLostError) -> None:
        """Fail all calls, waiting and new ones, since a rank is lost. May be called once."""
        self._lost.set_result(lost)

    def require_ranks(self) -> None:
        """Raise RankLostError once the engine has failed."""
        if self.is_lost:
            raise RankLostError(*self._lost.result().args)

    def close(self, patience_s: float | None = None) -> bool:
        """End the engine and its thread; waiting calls get a StateError. Returns True if both ended."""
        self.end(StateError(f"engine {self._name} is closed"))
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def end(self, why: WeightSyncError) -> None:
        """Stop the loop. Later calls raise `why`, unless it ended before."""
        with self._lock:
            if not self._ended:
                self._ended = why
                self.server.loop.call_soon_threadsafe(self.server.loop.stop)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Await `work` on the loop. Raises once a rank is lost, or the loop ended."""
        with self._lock:
            if not self._ended and not self.is_lost:
                return asyncio.run_coroutine_threadsafe(work, self.server.loop)
        work.close()
        self.require_ranks()
        assert self._ended
        raise self._ended

    def result(self, future: Future[T], timeout_s: float | None = None) -> T:
        """Wait for `future`. Raises RankLostError if a rank is lost first: the engine may never answer."""
        either: tuple[Future[Any], ...] = (future, self._lost)
        wait(either, timeout_s, return_when=FIRST_COMPLETED)
        if not future.done():
            self.require_ranks()
        return future.result(0)

    def _run(self, start: Callable[[], S], stop: Callable[[S], None], started: Future[AsyncServer]) -> None:
        asyncio.set_event_loop(given := asyncio.new_event_loop())  # only the main thread has one
        try:
            server = start()
        except BaseException as error:  # noqa: BLE001 - the constructor's thread raises it
            given.close()
            started.set_exception(error)
            return
        if server.loop is not given:  # before 0.5.21, SGLang makes one more
            given.close()
        started.set_result(server)
        try:
            server.loop.run_forever()
        finally:
            assert self._ended
            self._when_ended(self._ended)
            stop(server)
            _cancel_all(server.loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    async def end(tasks: set[asyncio.Task[Any]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(end(tasks))
    loop.close()
