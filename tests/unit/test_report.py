from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest

from weightsync import SyncReport
from weightsync.protocol.timing import Span
from weightsync.report import COVERAGE_HEAD, Covered, coverage_table

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
        "version 7: 16.4 GB to 2 of 3 engines in 0.5 s (moved at 82 GB/s), verified;"
        " e2 failed: engine e2 failed in move: out of memory"
    )
    assert str(replace(REPORT, nbytes=999, phases={}, verified=False, failures={})).endswith(
        "999 B to 2 of 3 engines in 0.5 s, not verified; STALE with version 6: e2"
    )


def test_engines_that_were_left_out_are_named_by_state() -> None:
    dead = {f"d{i}": "DEAD" for i in range(5)}
    states = {"e0": "SERVING", **dead, "e1": "SERVING"}
    engines = {"e0": 7, **dict.fromkeys(dead, 0), "e1": 6}
    text = str(replace(REPORT, engines=engines, states=states, failures={"d4": "engine d4 is gone"}))
    assert text.endswith(
        "to 1 of 7 engines in 0.5 s (moved at 82 GB/s), verified"
        "; DEAD: d0, d1 and 2 more; SERVING with version 6: e1; d4 failed: engine d4 is gone"
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


def test_metrics_are_flat_numbers_in_seconds_and_bytes() -> None:
    numbers = replace(REPORT, nonfinite={"w": 2, "b": 1}).metrics()
    assert numbers == {
        "weightsync/publish_s": 0.1,
        "weightsync/move_s": 0.2,
        "weightsync/sync_s": 0.5,
        "weightsync/move_bytes_per_s": pytest.approx(82e9),
        "weightsync/nbytes": 16_400_000_000,
        "weightsync/version": 7,
        "weightsync/num_serving": 2,
        "weightsync/num_failures": 1,
        "weightsync/num_nonfinite": 3,
    }


def test_metrics_of_components_have_the_component_in_their_names() -> None:
    both = {"model": REPORT, "adapter math": replace(REPORT, seconds=0.1)}
    numbers = replace(REPORT, components=both).metrics()
    assert len(numbers) == 3 * len(REPORT.metrics())
    assert numbers["weightsync/sync_s"] == numbers["weightsync/model/sync_s"] == 0.5
    assert numbers["weightsync/adapter_math/sync_s"] == 0.1


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
    assert str(replace(row, conversion="cast: 2 tensors")).endswith("657 kB; cast: 2 tensors")
    assert str(replace(row, conversion="load")) == str(replace(row, conversion="identity")) == str(row)


def test_a_table_of_coverage_has_one_row_for_engines_that_are_alike() -> None:
    tensors = [Sized(600_000), Sized(57_000)]
    rows = [
        Covered.of(f"e{i}", "model", tensors, "direct", "identity", version=7, proof="live weights")
        for i in range(5)
    ]
    rows[1] = Covered.of("e1", "model", tensors, "sync.mode is broadcast", "load", num_frozen=1)
    rows.append(Covered.of("e0", "draft", tensors, "", "", num_frozen=2, version=7))
    assert coverage_table(rows).splitlines() == [
        "engine             component  tensors      bytes   route      conversion  version  verified",
        "e0, e2 and 2 more  model      2            657 kB  direct     identity    7        live weights",
        "e1                 model      2, 1 frozen  657 kB  broadcast  load        none     not compared",
        "e0                 draft      2            657 kB  frozen     none        7        not compared",
    ]
    assert coverage_table([]).split() == list(COVERAGE_HEAD)


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
