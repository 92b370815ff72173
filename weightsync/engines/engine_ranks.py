"""What an adapter asks of its engine's ranks, each a `Rank` in the process that owns its parameters."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import ConfigError, EngineError, StateError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.plan import Plan, RankLayout
    from weightsync.protocol.handles import Attached
    from weightsync.protocol.messages import Digests, FeedTicket
    from weightsync.protocol.timing import Span

__all__ = ["CACHES", "WEIGHTS", "EngineRanks"]

logger = logging.getLogger("weightsync.engines")

WEIGHTS, CACHES = "weights", "kv_cache"
"""What sleeps, as both vLLM and SGLang call it, in the order in which it wakes."""


class EngineRanks(ABC):
    """The part of an adapter that is the same for all; `on_ranks` is how its ranks are reached.

    Live parameters keep their addresses while they sleep: what was found out about them stays true.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asleep: list[str] = []
        self._whole = False
        self._spans: list[Sequence[Span]] = []

    @abstractmethod
    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """What `method` of `Rank` answers on each rank. Raises the first error of ours, or EngineError."""

    def layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`. A rank without buffers takes whole tensors: its loader cuts its shard."""
        layouts: list[RankLayout] = self.on_ranks("layout")
        if len({bool(layout.buffers) for layout in layouts}) > 1:
            # Digests of shards and of whole tensors do not add up to one another.
            logger.warning("engine %s loads whole tensors: not all ranks can be written live", self._name)
            layouts = self.on_ranks("reload")
        return layouts

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """See `Engine.attach`."""
        return self.on_ranks("attach", plan, tuple(tickets), timeout_s, WEIGHTS in self._asleep)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """See `Engine.load`; of whole tensors, the digests are of what the engine's loader was handed."""
        self.require_awake("pause it first")
        self._whole = False
        loaded = self.on_ranks("load", attempt, timeout_s)
        self._whole = True
        self._spans = [spans for _, spans in loaded]
        return [digests for digests, _ in loaded]

    def spans(self) -> Sequence[Sequence[Span]]:
        """See `Engine.spans`."""
        return self._spans

    @abstractmethod
    def pause(self, mode: str, timeout_s: float) -> None:
        """See `Engine.pause`."""

    def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """See `Engine.sleep`."""
        field, needed = self._sleep_option(level)
        if not needed:
            raise ConfigError(
                field, False, f"engine {self._name} can sleep (level {level}) if started with true"
            )
        if WEIGHTS in self._asleep:
            return
        self.pause(mode, timeout_s)
        self._wake(CACHES)  # of a half awake one, vLLM takes no more notice
        with self._naming("sleep"):
            self._release(level)
        self._asleep = [WEIGHTS, CACHES]
        self._whole = self._whole and level == 1

    def require_awake(self, remedy: str) -> None:
        """Raises StateError while weights are asleep."""
        if WEIGHTS in self._asleep:
            raise StateError(f"engine {self._name} is asleep: {remedy}")

    def _wake(self, *parts: str) -> None:
        """Take the memory of `parts` back, of those that are asleep."""
        for part in [each for each in self._asleep if each in parts]:
            with self._naming("wake"):
                self._take(part)
            self._asleep.remove(part)
            if part == WEIGHTS and not self._whole:
                self.on_ranks("blank")

    @contextlib.contextmanager
    def _naming(self, phase: str) -> Iterator[None]:
        """What the engine itself raises becomes an EngineError: its memory may be half there."""
        try:
            yield
        except WeightSyncError:
            raise
        except Exception as error:  # whatever vLLM or SGLang raises where there is no memory
            raise EngineError(self._name, phase, f"{type(error).__name__}: {error}") from error

    @abstractmethod
    def _sleep_option(self, level: int) -> tuple[str, bool]:
        """The option that an engine needs to be started with to sleep, and whether it was."""

    @abstractmethod
    def _release(self, level: int) -> None:
        """Give all memory back, while paused."""

    @abstractmethod
    def _take(self, part: str) -> None:
        """Take one part back."""

    def require_whole(self) -> None:
        """Raises StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
