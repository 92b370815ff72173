"""Counts the drafted tokens that a vLLM engine has accepted, by vLLM's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from weightsync.engines.base import DraftCounts

_NUM_DRAFTED, _NUM_ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


class HasMetrics(Protocol):
    """The attributes of vLLM's ``LLMEngine`` that are used here."""

    log_stats: bool

    def get_metrics(self) -> Iterable[Any]: ...


def draft_counts(engine: HasMetrics) -> DraftCounts | None:
    """Return the counts since the engine started. None if it does not speculate, or keeps no statistics."""
    if not engine.log_stats:
        return None
    counts = Counter[str]()
    for metric in engine.get_metrics():
        if metric.name in (_NUM_DRAFTED, _NUM_ACCEPTED):
            counts[metric.name] += int(metric.value)
    return DraftCounts(counts[_NUM_DRAFTED], counts[_NUM_ACCEPTED]) if counts else None
