"""Base class of SGLang's adapters, which call the ranks through SGLang's weight loader."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from operator import methodcaller
from typing import Any

from weightsync.engines.rank.rank_process import RankProcess
from weightsync.engines.serving.engine_ranks import CACHES, WEIGHTS, EngineRanks, answers_of
from weightsync.engines.sglang.api import Manager, pack
from weightsync.engines.sglang.rank_calls import Replies
from weightsync.engines.sglang.worker import RankSettings
from weightsync.errors import EngineError

_ANSWER_S = 10.0
"""Time for answers to arrive after SGLang says that all ranks have sent them."""


class SglangRanks(EngineRanks):
    """Subclasses reach SGLang with `_asked`."""

    _settings: RankSettings
    _replies: Replies

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._asking = threading.Lock()

    def _join(self) -> list[RankProcess | None]:
        """Make the ranks, and connect them. Returns their processes."""
        found = self.on_ranks("join", os.getpid())
        self._replies.connected()
        return found

    def on_ranks(self, method: str, *args: object, wait_s: float | None = None) -> list[Any]:
        """Call `method` of `Rank` on each rank. Raises FutureTimeoutError after `wait_s` seconds."""
        with self._asking:
            has_draft = self._settings.speculation is not None and method == "join"
            for to_draft in (True, False) if has_draft else (False,):
                calls = self._replies.calls(self._settings, method, pack(args), to_draft)
                self._asked(method, methodcaller("on_ranks", calls), wait_s)
            part = str(args[2]) if method == "adapter" else ""
            return answers_of(self._replies.collect(calls, _ANSWER_S, part))

    @abstractmethod
    def _asked(
        self, method: str, work: Callable[[Manager], Coroutine[Any, Any, Any]], wait_s: float | None = None
    ) -> Any:  # noqa: ANN401 - SGLang's
        """Await `work` while no request is stepped. Raises EngineError and FutureTimeoutError."""

    def _release(self, level: int) -> None:
        tags = {"tags": [WEIGHTS, CACHES]}
        self._own("release_memory_occupation", "ReleaseMemoryOccupationReqInput", tags)

    def _allocate(self, part: str) -> None:
        self._own("resume_memory_occupation", "ResumeMemoryOccupationReqInput", {"tags": [part]})

    def _own(self, method: str, request: str, fields: Mapping[str, object]) -> Any:  # noqa: ANN401 - SGLang's
        outcome = self._asked(method, methodcaller("ask", method, request, **fields))
        if isinstance(outcome, tuple) and not outcome[0]:
            raise EngineError(self._name, method, str(outcome[1]))
        return outcome
