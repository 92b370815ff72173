"""Makes benchmarks/RESULTS.md from the files in benchmarks/results/: `python -m benchmarks.results`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "RESULTS.md"
FILES = Path(__file__).parent / "results"
MOST_ROWS = 40
HEAD = """# Results

Made by `python -m benchmarks.results` from `results/`, for GPUs: the newest file for each benchmark,
model, placement and hardware. Of more than 40 rows, the oldest without a comparison are left out.
Figures are medians in ms, with the least and the greatest of the rounds. If a file has several ways, the
quickest one counts. A host may have more GPUs than a case uses. [Benchmarks](README.md) explains the clocks.

| result | host | weightsync | others | commit | date |
|---|---|---|---|---|---|
"""
CASES = ("model", "engine", "placement", "trainer", "ranks")
CLOCKS = ("pause", "total", "ours")
"""The columns with a median and a range, the most telling first."""
Row = Mapping[str, Any]


def page() -> str:
    """Return the whole of benchmarks/RESULTS.md."""
    newest: dict[str, tuple[bool, str, str]] = {}
    for path in sorted(FILES.glob("*.json"), key=lambda path: ("-with-" in path.stem, path.stem)):
        record = json.loads(path.read_text())
        where = record.get("environment", {"gpus": []})
        name = re.sub(r"(-with)?-[0-9a-f]{7,8}(?=-)|-\d{4}-\d\d-\d\d$", "", path.stem).replace("-", " ")
        for case, ours, others in _cases(record) if where["gpus"] else ():
            gpus = f"{len(where['gpus'])} × {where['gpus'][0].removeprefix('NVIDIA ')}"
            cells = (f"[{name}{case}](results/{path.name})", gpus, ours, others, where["commit"][:8])
            row = (bool(others), where["date"], f"| {' | '.join(cells)} | {where['date'][:10]} |\n")
            # An older commit, measured beside a newer one, is no newer result.
            if name + case not in newest or ("-with-" not in path.stem and row[1] > newest[name + case][1]):
                newest[name + case] = row
    kept = sorted(newest.values(), reverse=True)[:MOST_ROWS]
    return HEAD + "".join(sorted(line for _, _, line in kept))


def _cases(record: Row) -> Iterator[tuple[str, str, str]]:
    """Yield each model, placement, trainer and cut of a file with its two figures."""
    rows = [row for row in record["rows"] if _clock(row) and "call" not in row]
    kinds = [" ".join(str(row[name]) for name in CASES if name in row) for row in rows]
    for kind in dict.fromkeys(kinds):
        of_kind = [row for row, other in zip(rows, kinds, strict=True) if other == kind]
        # Only updates of weightsync have the phase.
        ours = [row for row in of_kind if row.get("system") == "ours" or "publish ms" in row]
        others = [row for row in of_kind if row not in ours]
        # `bench_adapters` has both in one row.
        theirs = [f"{row['theirs ms']:.1f} ({row['theirs range']})" for row in ours if "theirs ms" in row]
        case = f", {kind}" if len({*kinds}) > 1 else ""
        if others and (ours or "system" in others[0]):  # the file may have peers alone
            theirs.append(_quickest(others))
            others = []
        yield case, _quickest(ours or others), "".join(theirs)


def _clock(row: Row) -> str:
    return next((name for name in CLOCKS if f"{name} range" in row and f"{name} ms" in row), "")


def _quickest(rows: list[Row]) -> str:
    if not rows:
        return ""
    clock = _clock(rows[0])
    row = min(rows, key=lambda row: row[f"{clock} ms"])
    name = row.get("system", row.get("way", "")) if "publish ms" not in row else ""
    name = "pause" if clock == "pause" else name.removeprefix("ours")
    return f"{name} {row[f'{clock} ms']:.1f} ({row[f'{clock} range']})".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
