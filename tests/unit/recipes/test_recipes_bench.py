"""What a bench shows of the updates that it made, and what it refuses before it starts any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.unit.test_report import REPORT
from weightsync.protocol.timing import Span
from weightsync.recipes import cli
from weightsync.recipes.config.recipe import load_recipe
from weightsync.recipes.forecast.catalog import load
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.inputs import recipe_file
from weightsync.recipes.loops import bench as recipe_bench
from weightsync.recipes.loops.policy import Policy
from weightsync.recipes.report.bench_report import BenchReport, BenchRow
from weightsync.report import Link, SyncReport

RUNNER = CliRunner()
RANK = "engine e0 rank 0"
LINKS = [
    Link("trainer 0", RANK, "same GPU or slot", 1_000_000_000),
    Link("trainer 1", RANK, "same host", 3_820_000_000),
]


def update(seconds: float) -> SyncReport:
    spans = {
        "driver": [Span("move", 0.0, seconds)],
        "trainer 0": [Span("publish", 0.0, seconds / 2)],
        RANK: [Span("load", 0.0, seconds / 4), Span("load", 1.0, seconds / 4), Span("verify", 2.0, seconds)],
    }
    return replace(
        REPORT, nbytes=5_000_000_000, seconds=2 * seconds, phases={"move": seconds}, spans=spans, routes={}
    )


def bench(*, cluster: bool) -> BenchReport:
    host = load(HostSpec, "4xh200", field="--cluster", kind="clusters")
    updates = [update(seconds) for seconds in (0.04, 0.2, 0.1)]
    return BenchReport.of(
        "it", "CPUs", {"e0": {"kind": "torch"}}, updates, LINKS, ("4xh200", host) if cluster else None
    )


def rows(report: BenchReport) -> dict[tuple[str, str], BenchRow]:
    return {(row.process, row.what): row for row in report.rows}


def test_each_rank_has_the_median_of_each_of_its_spans_which_add_up() -> None:
    found = rows(bench(cluster=False))
    assert list(found) == [
        ("driver", "move"),
        ("driver", "update"),
        ("trainer 0", "publish"),
        (RANK, "load"),
        (RANK, "verify"),
    ]
    load = found[RANK, "load"]
    assert (load.median, load.least, load.most) == pytest.approx((0.05, 0.02, 0.1))
    assert load.nbytes == 4_820_000_000
    assert load.gb_per_s == pytest.approx(96.4)
    assert found["driver", "move"].gb_per_s == pytest.approx(50)
    assert found["driver", "update"].median == pytest.approx(0.2)
    assert not any(row.floor_s for row in found.values())


def test_the_floor_of_a_rank_is_that_of_its_slowest_link() -> None:
    """3.82 GB over an NVLink of 382 GB/s are 10 ms, of the 50 that it took."""
    report = bench(cluster=True)
    assert rows(report)[RANK, "load"].floor_s == pytest.approx(0.01)
    lines = str(report).splitlines()
    assert lines[0] == "it: 3 updates of 5 GB, all verified, on CPUs"
    assert lines[2].split() == [
        "process",
        "what",
        "median",
        "least",
        "most",
        "bytes",
        "GB/s",
        "floor",
        "reached",
    ]
    (line,) = (line for line in lines if line.startswith(f"{RANK}  load"))
    assert line.endswith("50.0 ms  20.0 ms  100.0 ms  4.82 GB  96.4  10.0 ms      20%")
    assert lines[-1] == "floors are those of 4xh200"


def test_the_file_has_what_is_shown(tmp_path: Path) -> None:
    bench(cluster=True).write(tmp_path / "bench.json")
    made = json.loads((tmp_path / "bench.json").read_text())
    assert {"host", "packages", "started", "links"} <= set(made)
    assert made["rates"]["nvlink"] == 382
    assert made["rows"][3]["what"] == "load"
    assert made["rows"][3]["floor_s"] == pytest.approx(0.01)


def test_what_would_be_resumed_is_measured_without_a_cluster_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started: list[bool] = []
    monkeypatch.setattr(cli, "with_cluster", lambda _folder, _num_at_once, inside: inside())
    monkeypatch.setattr(recipe_bench, "run", lambda recipe, *_: started.append(recipe.resume))
    arguments = ["bench", "quickstart", "--set", "resume=true", "--out", str(tmp_path)]
    assert RUNNER.invoke(cli.app, arguments).exit_code == 0
    assert started == [False]


def test_engines_sleep_before_the_trainers_take_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(recipe_bench, "collect", lambda _, what, __: said.append(what))
    sync = SimpleNamespace(
        version=3,
        settle=lambda _: said.append("settle"),
        sleep=lambda level: said.append(f"sleep {level}"),
        update_weights=lambda version: said.append(f"update {version}"),
    )
    for level in ("0", "1"):
        recipe = load_recipe(recipe_file("quickstart"), [f"loop.sleep={level}"])
        recipe_bench._update(Policy(sync, {}), sync, {}, recipe)
    assert said == ["settle", "scramble", "update 4", "settle", "sleep 1", "scramble", "update 4"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["quickstart", "--updates", "0"], "--updates: 0 is not valid; give at least 1"),
        (["quickstart", "--cluster", "8xh2000"], "did you mean '8xh200'?"),
        (["quickstart", "--json", "/dev/null/bench.json"], "--json: '/dev/null/bench.json' is not valid"),
        (["quickstart", "--json", "/"], "--json: '/' is not valid; it is a folder: give a file"),
        (["quickstart", "--out", "/dev/null/bench"], "--out: '/dev/null/bench' is not valid"),
        (["quickstart", "--set", "engines.main.count=0"], "engines.main.count: 0 is not valid"),
        (
            ["quickstart", "--cluster", "8xh200", "--set", "sync.max_staging_bytes=4KiB"],
            "sync.max_staging_bytes: ",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.delattr(cli, "with_cluster")
    result = RUNNER.invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
