"""What this machine and its cluster can do, row by row, and what to do about what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Row", "is_fit", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at.

    Attributes:
        found: what is there.
        state: ``ok``; ``warn`` where things work, but not as fast or as safely as they could; ``missing``
            where the default configuration does not work without.
        remedy: what to do about it; empty if that is nothing.
    """

    name: str
    found: str
    state: Literal["ok", "warn", "missing"] = "ok"
    remedy: str = ""


def is_fit(rows: Iterable[Row]) -> bool:
    """Whether the default configuration works."""
    return all(row.state != "missing" for row in rows)


def table(rows: Sequence[Row]) -> str:
    """A line for each, and one below it for each remedy."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.state:<7}  {row.name:<{width}}  {row.found}")
        lines += [f"{'':<7}  {'':<{width}}  → {row.remedy}"] if row.remedy else []
    return "\n".join(lines)
