"""The ranks of a vLLM engine, whoever made it: what is asked of them goes through ``collective_rpc``."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from weightsync.engines.engine_ranks import EngineRanks
from weightsync.errors import EngineError, WeightSyncError

__all__ = ["VllmRanks"]


class VllmRanks(EngineRanks):
    """`_ask` is how its workers are reached."""

    def on_ranks(self, method: str, *args: object) -> list[Any]:
        """See `EngineRanks.on_ranks`; EngineError where vLLM could not ask them all."""
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
