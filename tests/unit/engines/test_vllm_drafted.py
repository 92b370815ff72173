"""What a vLLM's statistics say of drafted tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weightsync.engines import DraftCounts
from weightsync.engines.vllm.stepper import draft_counts

DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


def engine(*metrics: tuple[str, int], log_stats: bool = True) -> Any:
    held = [SimpleNamespace(name=name, value=value) for name, value in metrics]
    held.append(SimpleNamespace(name=f"{ACCEPTED}_per_pos", values=[3, 1]))
    return SimpleNamespace(log_stats=log_stats, get_metrics=lambda: held)


def test_counts_are_those_of_all_ranks_that_schedule() -> None:
    counted = draft_counts(
        engine((DRAFTED, 8), ("vllm:other", 50), (ACCEPTED, 3), (DRAFTED, 4), (ACCEPTED, 2))
    )
    assert counted == DraftCounts(12, 5)
    assert draft_counts(engine((DRAFTED, 0), (ACCEPTED, 0))) == DraftCounts(0, 0)


def test_an_engine_that_does_not_speculate_or_keeps_no_statistics_has_none() -> None:
    assert draft_counts(engine(("vllm:other", 50))) is None
    assert draft_counts(engine((DRAFTED, 8), (ACCEPTED, 3), log_stats=False)) is None


def test_the_share_is_of_what_came_after() -> None:
    counted = DraftCounts(12, 5).since(DraftCounts(4, 4))
    assert counted == DraftCounts(8, 1)
    assert counted.acceptance == 0.125
    assert counted.since(counted).acceptance is None
