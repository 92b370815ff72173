"""The output of `weightsync doctor`: checks with remedies, and the models of a fleet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from weightsync.report import Covered, coverage_table


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check.

    Attributes:
        found: the thing that was found.
        state: ``ok``; ``warn`` if it works, but slower or less safely than it could; ``missing`` if the
            default configuration needs it.
        remedy: a command or a setting that helps; empty if none is needed.
    """

    name: str
    found: str
    state: Literal["ok", "warn", "missing"] = "ok"
    remedy: str = ""


def is_fit(rows: Iterable[Row]) -> bool:
    """Return whether the default configuration works."""
    return all(row.state != "missing" for row in rows)


def table(rows: Sequence[Row]) -> str:
    """Return one line per row, with the remedy on the line below."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.state:<7}  {row.name:<{width}}  {row.found}")
        lines += [f"{'':<7}  {'':<{width}}  → {row.remedy}"] if row.remedy else []
    return "\n".join(lines)


def diagnosis(rows: Sequence[Row], served: Sequence[Covered] | None, *, planned: bool = False) -> str:
    """Return both tables. `served`: rows for `coverage_table`; None leaves that table out."""
    if served is None:
        return table(rows)
    shown = coverage_table(served, planned=planned) if served else "no engine has been connected"
    return "\n".join([table(rows), "", shown])


def diagnosis_json(rows: Sequence[Row], served: Sequence[Covered] | None) -> str:
    """Return the diagnosis as JSON: the rows, or an object with ``checks`` and ``serves``."""
    checks = [asdict(row) for row in rows]
    found = checks if served is None else {"checks": checks, "serves": [asdict(row) for row in served]}
    return json.dumps(found, indent=1)
