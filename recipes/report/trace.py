"""Writes updates as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, one track per rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightsync.recipes.report.run_folder import replace_text
from weightsync.report import HealReport, SyncReport

_GROUPS = ("driver", "trainer", "holder", "engine")
_Event = dict[str, object]


def write_trace(path: Path, updates: Sequence[SyncReport], heals: Sequence[HealReport] = ()) -> None:
    """Write spans of `updates`, and each engine's heals, as Chrome trace events.

    Times are microseconds since 1970 by each rank's host clock. Tracks of several hosts are offset as far as
    their clocks.
    """
    tracks: dict[str, list[_Event]] = {}
    for update in updates:
        for process, spans in update.spans.items():
            tracks.setdefault(process, []).extend(
                _span(span.name, span.began, span.seconds, version=update.version) for span in spans
            )
    for heal in heals:
        tracks.setdefault(f"engine {heal.engine}, heals", []).extend(_heal(heal))
    events = [
        event for number, process in enumerate(tracks) for event in _track(process, number, tracks[process])
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    replace_text(path, text + "\n")


def _track(process: str, number: int, events: Sequence[_Event]) -> Iterator[_Event]:
    group = next(place for place, name in enumerate(_GROUPS) if process.startswith(name))
    place: _Event = {"pid": group, "tid": number}
    yield {"ph": "M", "name": "process_name", "args": {"name": _GROUPS[group]}} | place
    yield {"ph": "M", "name": "thread_name", "args": {"name": process}} | place
    yield from (event | place for event in events)


def _heal(heal: HealReport) -> Iterator[_Event]:
    ready = heal.respawned_at or heal.died_at
    if heal.respawned_at is not None:
        yield _span("respawn", heal.died_at, ready - heal.died_at, cause=heal.cause)
    if heal.serving_at is not None:
        yield _span("refill", ready, heal.serving_at - ready, cause=heal.cause, version=heal.version)


def _span(name: str, began: float, seconds: float, **args: object) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": "weightsync",
        "ts": began * 1e6,
        "dur": seconds * 1e6,
        "args": args,
    }
