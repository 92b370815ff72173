"""What is measured on GPUs runs here without one, so that it is known to run."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang"])
def test_the_layers_of_an_engines_updates_are_measured_and_its_weights_right(
    tmp_path: Path, engine: str
) -> None:
    """Without GPUs, only SGLang has a way of its own."""
    if not importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is not installed")
    out = tmp_path / "latency.json"
    asked = ["--cpu", "--engine", engine, "--model", "tiny", "--rounds", "1", "--each-rounds", "1"]
    asked += ["--part-timeout", "350", "--bucket-mib", "0", "--json", str(out)]
    command = [sys.executable, "-m", "benchmarks.bench_latency", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert "notes" not in record, record["notes"]
    rows = {row["way"]: row for row in record["rows"]}
    own = ["per-tensor", "per-tensor, one by one", "bucketed"] if engine == "sglang" else []
    assert list(rows) == [*own, "direct"]
    assert rows["direct"]["last report"]["verified"]
    for name in own:
        row = rows[name]
        parts = ("metadata", "open", "load", "way", "cache", "rest")
        assert sum(row[f"{part} ms"] for part in (*parts, *(["pack"] if name == "bucketed" else []))) == (
            pytest.approx(row["total ms"])
        )
        assert row["calls"] == (1 if name == "per-tensor" else 25)
