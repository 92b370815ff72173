"""Moves of one holder, each made once however often it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError

from weightsync.channel.wire import SentError
from weightsync.errors import DeadlineError, PeerError, StateError, WeightSyncError
from weightsync.protocol.messages import Moved


class MoveOnce:
    """The moves of one holder, from one `prepare` to the next.

    If a relay fails, the driver asks the holder itself. A holder that is already moving does not begin again:
    both callers get its answer. A request that a relay passes on too late is refused.
    """

    def __init__(self, name: str) -> None:
        """`name`: the holder's."""
        self._name, self._lock = name, threading.Lock()
        self._attempt, self._is_over = 0, False
        self._answer: Future[Moved | SentError] = Future()

    def move(self, attempt: int, work: Callable[[], Moved], timeout_s: float) -> Moved:
        """Return the result of `work` for this attempt.

        If another caller runs `work`, wait `timeout_s` for the result.

        Raises the error of `work`, DeadlineError if `work` does not end, and StateError if a later attempt
        has begun, or after `close`.
        """
        with self._lock:
            if self._is_over or attempt < self._attempt:
                raise StateError(f"{self._name} was asked for attempt {attempt} after it was given up")
            is_first = attempt > self._attempt
            if is_first:
                self._attempt, self._answer = attempt, Future()
            answer = self._answer
        if is_first:
            return self._work(work, answer)
        try:
            said = answer.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineError("move", (self._name,), timeout_s) from error
        if isinstance(said, SentError):
            raise said.rebuild()
        return said

    def close(self) -> None:
        """Refuse later calls."""
        with self._lock:
            self._is_over = True

    def _work(self, work: Callable[[], Moved], answer: Future[Moved | SentError]) -> Moved:
        try:
            moved = work()
        except BaseException as error:
            # Without the traceback, which would keep an engine's memory mapped.
            ours = error if isinstance(error, WeightSyncError) else None
            answer.set_result(SentError.of(ours or PeerError(self._name, f"{type(error).__name__}: {error}")))
            raise
        answer.set_result(moved)
        return moved
