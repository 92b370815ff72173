"""What is measured on GPUs runs here without one, so that it is known to run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.timeout(120)
def test_updates_of_a_fleet_without_gpus_are_measured_and_right(tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    asked = ["--gpu", "--cpu", "--source", "device", "--model", "tiny", "--world", "2", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.bench_sync", *asked, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 1
    assert all(row["last report"]["verified"] for row in rows)
