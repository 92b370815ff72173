"""`weightsync bench`, from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.actors.test_quickstart import weightsync

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


def test_the_updates_of_a_small_fleet_are_measured(tmp_path: Path) -> None:
    small = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1"]
    sets = [part for setting in small for part in ("--set", setting)]
    out = tmp_path / "bench.json"
    asked = ["--updates", "3", "--cluster", "4xh200", "--json", str(out), "--out", str(tmp_path / "run")]
    done = weightsync("bench", "quickstart", *sets, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quickstart: 3 updates of 1.25 MB, all verified, on " in done.stdout
    assert "start 1 trainer and 1 engine on CPUs (no GPUs here" in done.stdout
    assert "floors are those of 4xh200" in done.stdout
    assert "this fleet ran on CPUs: comparing it with the floors of 4xh200 means nothing" in done.stdout
    made = json.loads(out.read_text())
    rows = {(row["process"], row["what"]): row for row in made["rows"]}
    assert {("trainer 0", "publish"), ("holder 0", "move"), ("driver", "update")} <= set(rows)
    load = rows["engine main-0 rank 0", "load"]
    assert load["nbytes"] == made["nbytes"]
    assert 0 < load["floor_s"] < load["least"] <= load["median"] <= load["most"]
    assert rows["driver", "update"]["median"] > rows["driver", "move"]["median"] > load["median"]


def test_a_fleet_that_takes_turns_does_so_in_a_bench(tmp_path: Path) -> None:
    small = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1", "loop.sleep=1"]
    sets = [part for setting in small for part in ("--set", setting)]
    done = weightsync(
        "bench", "quickstart", *sets, "--updates", "2", "--json", "/dev/full", "--out", str(tmp_path / "run")
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr == "weightsync: could not write /dev/full: No space left on device\n"
    assert "quickstart: 2 updates of 1.25 MB, all verified" in done.stdout


def test_an_update_that_fails_fails_the_bench(tmp_path: Path) -> None:
    late = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1", "sync.timeout_s=0.001"]
    sets = [part for setting in late for part in ("--set", setting)]
    done = weightsync("bench", "quickstart", *sets, "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "no answer within 0.001 s" in done.stderr
    assert len(done.stderr.splitlines()) == 1
