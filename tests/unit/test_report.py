from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest

from weightsync import SyncReport
from weightsync.protocol.timing import Span
from weightsync.report import Covered

REPORT = SyncReport(
    version=7,
    nbytes=16_400_000_000,
    seconds=0.5,
    phases=MappingProxyType({"publish": 0.1, "move": 0.2}),
    verified=True,
    engines={"e0": 7, "e1": 7, "e2": 6},
    states={"e0": "SERVING", "e1": "SERVING", "e2": "STALE"},
    failures={"e2": "engine e2 failed in move: out of memory"},
    digest="00ff",
    num_buckets=62,
    epoch=1,
    connect_phases=MappingProxyType({"warm_up": 1.5}),
    spans={"driver": (Span("publish", 1.7e9, 0.1),), "engine e0 rank 0": (Span("load", 1.7e9, 0.2),)},
)


def test_speed_is_payload_over_the_move_phase() -> None:
    assert REPORT.gb_per_s == pytest.approx(82.0)
    assert replace(REPORT, phases={}).gb_per_s == 0.0


def test_one_line_says_what_happened() -> None:
    assert str(REPORT) == (
        "version 7: 16.4 GB to 2 of 3 engines in 0.5 s (82 GB/s), verified;"
        " e2 failed: engine e2 failed in move: out of memory"
    )
    assert str(replace(REPORT, nbytes=999, phases={}, verified=False, failures={})).endswith(
        "999 B to 2 of 3 engines in 0.5 s (0 GB/s), not verified"
    )


def test_one_engine_is_one() -> None:
    one = str(replace(REPORT, engines={"e0": 7}, failures={}))
    assert one.startswith("version 7: 16.4 GB to 1 of 1 engine in 0.5 s")


def test_to_dict_is_json_and_complete() -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    speed = data.pop("gb_per_s")
    assert speed == REPORT.gb_per_s
    spans = {name: tuple(Span(**span) for span in spans) for name, spans in data.pop("spans").items()}
    assert SyncReport(**data, spans=spans) == replace(
        REPORT, phases=dict(REPORT.phases), connect_phases=dict(REPORT.connect_phases)
    )


def test_a_row_of_coverage_is_one_line() -> None:
    row = Covered(
        engine="e0",
        component="draft",
        version=3,
        num_tensors=21,
        num_frozen=21,
        nbytes=657_000,
        route="",
        proof="live weights",
    )
    assert str(row) == "e0, draft: version 3, live weights; 21 tensors, all frozen, 657 kB"
    assert (
        str(replace(row, num_frozen=2, version=0))
        == "e0, draft: no version; 21 tensors, 2 of them frozen, 657 kB"
    )
    assert (
        str(replace(row, num_frozen=0, proof="")) == "e0, draft: version 3, not compared; 21 tensors, 657 kB"
    )
