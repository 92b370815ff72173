from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.recipes.test_recipes_page import run_report
from tests.unit.test_report import REPORT
from weightsync.protocol.timing import Span
from weightsync.recipes.report.trace import write_trace

SPANS = {
    "driver": (Span("publish", 1.7e9, 0.25), Span("move", 1.7e9 + 1, 0.5)),
    "trainer 0": (Span("publish", 1.7e9 + 0.125, 0.0625),),
    "holder 0": (Span("move", 1.7e9 + 1, 0.25),),
    "engine e0 rank 0": (Span("load", 1.7e9 + 1, 0.25), Span("verify", 1.7e9 + 1.25, 0.125)),
    "engine e0 rank 1": (Span("load", 1.7e9 + 1, 0.25),),
}


def test_every_rank_has_a_track_with_the_spans_of_each_update(tmp_path: Path) -> None:
    updates = [replace(REPORT, version=version, spans=SPANS) for version in (7, 8)]
    write_trace(tmp_path / "trace.json", updates)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == list(SPANS)
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert groups == {0: "driver", 1: "trainer", 2: "holder", 3: "engine"}
    found = {
        (names[e["pid"], e["tid"]], e["name"]): e
        for e in events
        if e["ph"] == "X"
        if e["args"]["version"] == 8
    }
    assert found.keys() == {(name, span.name) for name, spans in SPANS.items() for span in spans}
    load = found["engine e0 rank 1", "load"]
    assert (load["ts"], load["dur"]) == ((1.7e9 + 1) * 1e6, 0.25e6)
    assert len([e for e in events if e["ph"] == "X"]) == 2 * sum(map(len, SPANS.values()))


def test_heals_have_tracks_of_their_own(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [], run_report().heals)
    group, track, *spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (group["args"]["name"], track["args"]["name"]) == ("engine", "engine main-1, heals")
    assert [(span["name"], span["dur"]) for span in spans] == [
        ("respawn", pytest.approx(3e6)),
        ("refill", pytest.approx(1.5e6)),
    ]
