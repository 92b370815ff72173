"""Draws a bar chart of a result file: medians with ranges.

    python -m benchmarks.plot benchmarks/results/FILE.json --out FILE.svg

Needs matplotlib. One panel per table of the file, one bar per row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.report import DIRECT, is_direct

__all__ = ["main"]

Row = Mapping[str, Any]

_LABELS = ("system", "route", "call", "model", "source", "placement", "bucket", "bucket MiB", "slots")
_BEFORE = ("publish ms", "register ms", "gather ms")
"""Phases that end before the engines have to wait."""
_OURS, _OTHERS = "#1b6ca8", "#b9c0c7"


def main() -> None:
    """Read a result file and write its chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="ends in .png or .svg")
    args = parser.parse_args()
    draw(json.loads(args.file.read_text()), args.out)


def draw(record: Mapping[str, Any], out: Path) -> None:
    """Write the chart of one result file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in record["rows"] if "total ms" in row]
    tables = list(dict.fromkeys(row.get("table", record["benchmark"]) for row in rows))
    panels = [[row for row in rows if row.get("table", record["benchmark"]) == table] for table in tables]
    heights = [len(panel) * 0.42 + 0.6 for panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        squeeze=False,
        figsize=(9, sum(heights) + 1.2),
        height_ratios=heights,
        layout="constrained",
        facecolor="white",
    )
    for axis, table, panel in zip(axes[:, 0], tables, panels, strict=True):
        _panel(axis, str(table), panel)
    figure.text(0.01, -0.01, _where(record["environment"]), fontsize=7, color="#555555", va="top")
    figure.savefig(out, dpi=160, bbox_inches="tight")
    plt.close(figure)


def _panel(axis: Any, title: str, rows: Sequence[Row]) -> None:  # noqa: ANN401 (matplotlib's Axes)
    medians = [float(row["total ms"]) for row in rows]
    samples = [row.get("total samples ms") or [row["total ms"]] for row in rows]
    low = [median - min(taken) for median, taken in zip(medians, samples, strict=True)]
    high = [max(taken) - median for median, taken in zip(medians, samples, strict=True)]
    labels = _labels(rows)
    places = range(len(rows))
    colours = [_OURS if _is_ours(row) else _OTHERS for row in rows]
    axis.barh(places, medians, color=colours, height=0.7, xerr=(low, high), ecolor="#333333", capsize=2.5)
    before = [sum(float(row.get(phase, 0.0)) for phase in _BEFORE) for row in rows]
    if any(before):
        axis.barh(places, before, color="white", alpha=0.55, height=0.7, hatch="///", edgecolor="#555555")
    for place, median, ready, above in zip(places, medians, before, high, strict=True):
        axis.annotate(
            _figures(median, ready),
            (median + above, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            size=8,
        )
    axis.set_yticks(list(places), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(median + above for median, above in zip(medians, high, strict=True)) * 1.3)
    hatched = "; hatched: publish, or register and gather" if any(before) else ""
    axis.set_xlabel(f"ms, median and range{hatched}", fontsize=8)
    axis.set_title(title, loc="left", fontsize=10)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="#e6e6e6")
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _figures(total: float, before: float) -> str:
    return f"{total:.4g} ms, {before:.4g} of it before" if before else f"{total:.4g} ms"


def _labels(rows: Sequence[Row]) -> list[str]:
    """Return labels that tell the rows of a panel apart."""
    telling = [
        key
        for key in (*_LABELS, "world")
        if key in ("system", "call") or len({str(row.get(key)) for row in rows}) > 1
    ]
    return [", ".join(_part(key, row[key]) for key in telling if row.get(key) is not None) for row in rows]


def _part(key: str, value: object) -> str:
    if key == "route":  # otherwise the route is a reason
        return DIRECT if is_direct(str(value)) else "broadcast"
    units = {"bucket MiB": "{} MiB", "slots": "{} slots", "world": "{} GPUs", "source": "{} source"}
    return units.get(key, "{}").format(value)


def _is_ours(row: Row) -> bool:
    return str(row.get("system", row.get("call", "ours"))).startswith("our")


def _where(environment: Mapping[str, Any]) -> str:
    gpus = environment["gpus"]
    hardware = f"{len(gpus)} x {gpus[0]}" if gpus else environment["cpu"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{hardware}; {versions}\ncommit {environment['commit']}, {environment['date']}"


if __name__ == "__main__":
    main()
