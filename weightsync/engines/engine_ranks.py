"""What an adapter asks of its engine's ranks, each a `Rank` in the process that owns its parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import StateError

if TYPE_CHECKING:
    from weightsync.buffers import Attached
    from weightsync.clock import Span
    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan, RankLayout
    from weightsync.verify import Digests

__all__ = ["EngineRanks"]

logger = logging.getLogger("weightsync.engines")


class EngineRanks:
    """The part of an adapter that is the same for all; `on_ranks` is how its ranks are reached."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole = False
        self._spans: list[Sequence[Span]] = []

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """What `method` of `Rank` answers on each rank. Raises the first error of ours, or EngineError."""
        raise NotImplementedError

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
        return self.on_ranks("attach", plan, tuple(tickets), timeout_s)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """See `Engine.load`; of whole tensors, the digests are of what the engine's loader was handed."""
        self._whole = False
        loaded = self.on_ranks("load", attempt, timeout_s)
        self._whole = True
        self._spans = [spans for _, spans in loaded]
        return [digests for digests, _ in loaded]

    def spans(self) -> Sequence[Sequence[Span]]:
        """See `Engine.spans`."""
        return self._spans

    def require_whole(self) -> None:
        """Raises StateError while the weights are dummies or a mix."""
        if not self._whole:
            raise StateError(f"engine {self._name} has no whole weights: load them first")
