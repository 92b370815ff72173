"""Makes ``report.html``: a page of a run, without other files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from weightsync.errors import ConfigError
from weightsync.protocol.timing import Span
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.report.run_folder import replace_text
from weightsync.recipes.report.run_report import NUM_LAST, RunReport, StepRow
from weightsync.recipes.report.svg import Axis, Bar, Row, columns, lanes, line
from weightsync.recipes.report.time_shares import TimeShares, last_update
from weightsync.report import COVERAGE_HEAD, coverage_cells, is_direct
from weightsync.text import count_text, rate_text, size_text, size_unit

_NARROW, _WIDE = 336, 980
_PHASES = ("publish", "stage", "pause", "move", "load", "verify", "commit")
_FLOOR = 7
"""Colour of the floor, which no phase has."""
_MEANINGS = (
    "Publish: trainers make their new weights readable. Pause: engines stop answering. Move: the weights go "
    "to the engines; load is an engine rank's part of it. Verify: the digests of both sides are compared. "
    "Commit: engines serve the new version. Stage, before pause in a staged update: the weights reach the "
    "engines' hosts, or GPUs, while engines answer."
)
_SERVED = ("the version just committed", "an older one")
_MOST_COLUMNS, _MOST_ROWS = 60, 48
_DISTANCES = ("same GPU or slot", "same host", "other host")


@dataclass(frozen=True, slots=True)
class _Chart:
    """A chart in two widths; the page shows one. `legend`: pairs of colour number and meaning."""

    narrow: Markup
    wide: Markup
    legend: Sequence[tuple[int, str]] = ()


def write_page(report: RunReport, path: Path, cluster: tuple[str, HostSpec] | None = None) -> None:
    """Write the page of `report` to `path`. Raises ConfigError if it cannot be written."""
    try:
        replace_text(path, page(report, cluster))
    except OSError as error:
        raise ConfigError("report.html", str(path), f"give a folder to write to: {error.strerror}") from error


def page(report: RunReport, cluster: tuple[str, HostSpec] | None = None) -> str:
    """Return the page as HTML that loads nothing. `cluster` gives links' rates, and so the floor."""
    environment = Environment(
        loader=PackageLoader("weightsync.recipes.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": size_text, "ms": _milliseconds, "clock": _clock}
    ranks, shares = _slowest(report.spans), last_update(report, cluster)
    rewards = [(row.step, row.reward) for row in report.steps]
    return environment.get_template("report.html.j2").render(
        run=report,
        facts=_facts(report),
        rewards=_by_step("Mean reward", rewards, 1.0, report.target_reward),
        acceptance=_by_step("Share of the drafted tokens that engines accepted", report.acceptances, 1.0),
        mismatch=_by_step("Mean difference of log-probabilities, trainers to engines", report.mismatches),
        versions=_versions(report) if report.steps else None,
        seconds=_seconds(report) if any(row.phases for row in report.steps) else None,
        num_columns=_MOST_COLUMNS,
        meanings=_MEANINGS,
        phases=_phases(report),
        shares=_shares(shares) if shares else None,
        parts=shares.parts if shares else {},
        cluster=cluster[0] if cluster else "",
        timeline=_timeline(ranks) if ranks else None,
        ranks=ranks,
        since=min((span.began for spans in ranks.values() for span in spans), default=0.0),
        num_left_out=len(report.spans) - len(ranks),
        links=_links(report) if report.links else None,
        coverage_head=COVERAGE_HEAD,
        served=coverage_cells(report.coverage),
        reasons=_reasons(report),
        failed=[row for row in report.steps if row.failures or row.retried],
    )


def _reasons(report: RunReport) -> list[str]:
    """Return the reasons for broadcasts, each with the engines of that reason."""
    why: dict[str, list[str]] = {}
    for row in report.coverage:
        if row.component == "model" and row.route and not is_direct(row.route):
            why.setdefault(row.route, []).append(row.engine)
    return [f"{', '.join(names)}: {reason}" for reason, names in why.items()]


def _facts(report: RunReport) -> list[tuple[str, str, str]]:
    """The facts of a run: name, value and note."""
    rows = report.steps
    if not rows:
        return [("Steps", "0", "no update was committed after a step")]
    seconds = [row.sync_seconds for row in rows]
    num_failures = sum(len(row.failures) + bool(row.retried) for row in rows) + (report.status == "failed")
    target = f"target {report.target_reward:g}; " if report.target_reward else ""
    return [
        (
            f"Reward, last {count_text(min(NUM_LAST, len(rows)), 'step')}",
            f"{report.final_reward:.3f}",
            f"{target}{report.first_reward:.3f} at first",
        ),
        (
            "Updates verified",
            f"{report.num_verified} of {len(rows)}",
            "; ".join(filter(None, (report.on_all, f"version {rows[-1].version} is the newest"))),
        ),
        (
            "Update, median",
            _milliseconds(statistics.median(seconds)),
            f"{_milliseconds(max(seconds))} the longest",
        ),
        ("Bytes of an update", size_text(rows[-1].bytes), f"{rate_text(rows[-1].gb_per_s)} while moving"),
        ("Failures", f"{num_failures}", count_text(len(report.heals), "heal")),
    ]


def _by_step(
    what: str, points: Sequence[tuple[int, float]], most: float | None = None, target: float = 0.0
) -> _Chart | None:
    """Draw values by step, None without any. The axis ends at `most`, by default the greatest value."""
    top = max((value for _, value in points), default=0.0) if most is None else most
    return _chart(lambda width: line(f"{what}, by step", points, width, top, target)) if points else None


def _versions(report: RunReport) -> _Chart:
    names = sorted({name for row in report.steps for name in row.engines})
    first = report.steps[0].version
    rows = [Row(name, list(_served(report.steps, name, first))) for name in names]
    num_versions = report.steps[-1].version - first + 1
    title = "Versions that each engine served after their update"
    axis = Axis(num_versions, "version {:g}", first - 0.5)
    return _chart(lambda width: lanes(title, rows, width, axis), [*enumerate(_SERVED)])


def _served(steps: Sequence[StepRow], name: str, first: int) -> Iterator[Bar]:
    """Yield bars for stretches in which engine `name` served the version or an older one."""

    def colour(row: StepRow) -> int | None:
        return int(row.engines[name] != row.version) if row.engines.get(name) else None

    for found, group in groupby(steps, key=colour):
        rows = list(group)
        if found is not None:
            ends = rows if len(rows) == 1 else (rows[0], rows[-1])
            said = [f"version {row.engines[name]} at {_clock(row.committed_at)}" for row in ends]
            size = rows[-1].version - rows[0].version + 1
            yield Bar(found, size, f"{name}: {' to '.join(said)}", rows[0].version - first)


def _seconds(report: RunReport) -> _Chart:
    stacks = []
    for row in report.steps[-_MOST_COLUMNS:]:
        said = {phase: f"step {row.step}, {phase}: {_milliseconds(s)}" for phase, s in row.phases.items()}
        bars = [Bar(_phase(phase), s * 1e3, said[phase]) for phase, s in row.phases.items()]
        stacks.append((str(row.step), bars))
    most = max(sum(bar.size for bar in bars) for _, bars in stacks)
    found = {phase for row in report.steps for phase in row.phases}
    title = "Milliseconds of each update, by phase"
    return _chart(lambda width: columns(title, stacks, width, most), _known(_PHASES, found))


def _phases(report: RunReport) -> list[tuple[str, float, float]]:
    """Median and longest seconds of each phase."""
    found = {phase: [row.phases.get(phase, 0.0) for row in report.steps] for phase in _PHASES}
    return [(phase, statistics.median(s), max(s)) for phase, s in found.items() if any(s)]


def _shares(shares: TimeShares) -> _Chart:
    bars = [
        Bar(_FLOOR if name == "floor" else _phase(name), seconds * 1e3, f"{name}: {_milliseconds(seconds)}")
        for name, seconds in shares.parts.items()
    ]
    rows, axis = [Row("last update", bars)], Axis(sum(bar.size for bar in bars), "{:g} ms")
    title = "Milliseconds of the last update: its floor, its bytes, and what was beside them"
    legend = [(bar.colour, name) for bar, name in zip(bars, shares.parts, strict=True)]
    return _chart(lambda width: lanes(title, rows, width, axis), legend)


def _slowest(ranks: Mapping[str, Sequence[Span]]) -> dict[str, Sequence[Span]]:
    """Return the slowest of `ranks`, in their order."""
    most = sorted(ranks, key=lambda name: -sum(span.seconds for span in ranks[name]))[:_MOST_ROWS]
    return {name: spans for name, spans in ranks.items() if name in most and spans}


def _timeline(ranks: Mapping[str, Sequence[Span]]) -> _Chart:
    spans = [span for each in ranks.values() for span in each]
    begin, end = min(s.began for s in spans), max(s.began + s.seconds for s in spans)

    def bar(name: str, span: Span) -> Bar:
        text = f"{name}, {span.name}: {_milliseconds(span.seconds)}"
        return Bar(_phase(span.name), span.seconds * 1e3, text, (span.began - begin) * 1e3)

    rows = [Row(name, [bar(name, span) for span in each]) for name, each in ranks.items()]
    axis = Axis(max((end - begin) * 1e3, 1e-3), "{:g} ms")
    title = "What each rank did in the last update"
    return _chart(lambda width: lanes(title, rows, width, axis), _known(_PHASES, {s.name for s in spans}))


def _links(report: RunReport) -> _Chart:
    taken: Counter[str] = Counter()
    for link in report.links:
        taken[link.target] += link.nbytes
    most = max(taken.values())
    scale, unit = size_unit(most)
    bars: dict[str, list[Bar]] = {name: [] for name in taken}
    for link in sorted(report.links, key=lambda link: _DISTANCES.index(link.distance)):
        text = f"{link.source} to {link.target}, {link.distance}: {size_text(link.nbytes)}"
        bars[link.target].append(Bar(_DISTANCES.index(link.distance), link.nbytes / scale, text))
    rows, axis = [Row(*each) for each in bars.items()], Axis(most / scale or 1, f"{{:g}} {unit}")
    found = {link.distance for link in report.links}
    title = "Bytes that each engine rank takes in an update, by distance"
    return _chart(lambda width: lanes(title, rows, width, axis), _known(_DISTANCES, found))


def _chart(draw: Callable[[int], Markup], legend: Sequence[tuple[int, str]] = ()) -> _Chart:
    return _Chart(draw(_NARROW), draw(_WIDE), legend)


def _known(names: Sequence[str], found: Collection[str]) -> list[tuple[int, str]]:
    return [(place, name) for place, name in enumerate(names) if name in found]


def _phase(name: str) -> int:
    return _PHASES.index(name) if name in _PHASES else len(_PHASES)


def _milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")
