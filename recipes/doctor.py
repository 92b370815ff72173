"""The table of `weightsync doctor`: what a machine can do, and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check.

    Attributes:
        found: what is there.
        state: ``ok``; ``warn`` if it works, but slower or less safely than it could; ``missing`` if the
            default configuration needs it.
        remedy: what to do about it, or empty.
    """

    name: str
    found: str
    state: Literal["ok", "warn", "missing"] = "ok"
    remedy: str = ""


def is_fit(rows: Iterable[Row]) -> bool:
    """Return whether the default configuration works."""
    return all(row.state != "missing" for row in rows)


def table(rows: Sequence[Row]) -> str:
    """Return one line per row, with its remedy on the line below."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.state:<7}  {row.name:<{width}}  {row.found}")
        lines += [f"{'':<7}  {'':<{width}}  → {row.remedy}"] if row.remedy else []
    return "\n".join(lines)
