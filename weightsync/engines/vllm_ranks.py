"""The ranks of a vLLM engine, whoever made it: what is asked of them goes through ``collective_rpc``."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightsync.errors import EngineError, StateError, WeightSyncError

if TYPE_CHECKING:
    from weightsync.buffers import Attached
    from weightsync.clock import Span
    from weightsync.feed import FeedTicket
    from weightsync.plan import Plan, RankLayout
    from weightsync.verify import Digests

__all__ = ["VllmRanks"]

logger = logging.getLogger("weightsync.engines.vllm")


class VllmRanks:
    """The part of an adapter that is the same for every vLLM; `_ask` is how its workers are reached."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole = False
        self._spans: list[Sequence[Span]] = []

    def layout(self) -> Sequence[RankLayout]:
        """See `Engine.layout`. A rank without buffers takes whole tensors: vLLM's loader cuts its shard."""
        layouts: list[RankLayout] = self.on_ranks("layout")
        if len({bool(layout.buffers) for layout in layouts}) > 1:
            # Digests of shards and of whole tensors do not add up to one another.
            logger.warning("engine %s reloads on all ranks: not all can be written live", self._name)
            layouts = self.on_ranks("reload")
        return layouts

    def attach(self, plan: Plan, tickets: Sequence[FeedTicket], timeout_s: float) -> Sequence[Attached]:
        """See `Engine.attach`."""
        return self.on_ranks("attach", plan, tuple(tickets), timeout_s)

    def load(self, attempt: int, timeout_s: float) -> Sequence[Digests]:
        """See `Engine.load`; where vLLM reloads, the digests are of the tensors handed to its loader."""
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

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """What `method` of `WeightSyncWorker` answers on each rank, or the first error of ours.

        Raises EngineError where vLLM could not ask them all.
        """
        # Bytes of our own pickling pass between vLLM's processes without its insecure mode.
        blob = pickle.dumps((method, args))
        try:
            replies = self._ask(blob)
        except WeightSyncError:
            raise
        except Exception as error:  # whatever vLLM raises where a worker's process is gone
            raise EngineError(self._name, method, f"{type(error).__name__}: {error}") from error
        outcomes = [pickle.loads(reply) for reply in replies]
        for outcome in outcomes:
            if isinstance(outcome, WeightSyncError):
                raise outcome
        return outcomes

    def _ask(self, blob: bytes) -> Sequence[bytes]:
        raise NotImplementedError
