"""Compares what two engines say to the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Answers", "assert_same", "likeliest"]

Answers = Sequence[Mapping[str, Any]]
"""Per prompt its tokens, and rows of the likeliest tokens with their log-probabilities."""


def likeliest(row: Iterable[tuple[int, float]], top: int) -> list[list[float]]:
    """A row, without the tokens of those as likely as the last: of equal ones, the kernel chooses."""
    row = list(row)
    last = sorted((logprob for _, logprob in row), reverse=True)[:top][-1]
    return sorted([-1 if logprob == last else token, logprob] for token, logprob in row)


def assert_same(found: Answers, expected: Answers) -> None:
    """Tokens first, for they say more; then every float."""
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    others = [
        f"prompt {number}, {kind} {place}: {rows[0]} and not {rows[1]}"
        for number, answers in enumerate(zip(found, expected, strict=True))
        for kind in ("prompt_logprobs", "logprobs")
        for place, rows in enumerate(zip(*(each[kind] for each in answers), strict=True))
        if rows[0] != rows[1]
    ]
    assert not others, f"{len(others)} rows are others: " + "; ".join(others[:5])
