"""What is measured on GPUs runs here without one, so that it is known to run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[2]


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_updates_of_a_fleet_without_gpus_are_measured_and_right(tmp_path: Path) -> None:
    asked = [
        "--gpu",
        "--cpu",
        "--source",
        "device",
        "--model",
        "tiny",
        "--world",
        "2",
        "--rounds",
        "1",
        "--join",
    ]
    rows, stages = measured("bench_sync", *asked, out=tmp_path / "sync.json")
    assert len(rows) == 1
    assert all(row["last report"]["verified"] for row in rows)
    assert "s  connecting\n" in stages
    assert all(row["join s"] > 0 for row in rows)


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_tokens_are_counted_while_updates_are_staged(tmp_path: Path) -> None:
    asked = ["--cpu", "--engine", "torch", "--model", "tiny", "--rounds", "1", "--clients", "2"]
    (row,), _ = measured("bench_staged", *asked, out=tmp_path / "staged.json")
    assert row["last report"]["verified"]
    assert row["last report"]["phases"]["stage"] > 0
    assert min(row["tokens/s"], row["tokens/s arriving"]) > 0


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_what_a_commit_computes_again_is_counted(tmp_path: Path) -> None:
    asked = ["--requests", "2", "--prompt", "128", "--rounds", "1", "--hidden", "128", "--layers", "2"]
    (drop, salt), _ = measured("bench_caches", *asked, out=tmp_path / "caches.json")
    assert (drop["prefix_cache"], salt["prefix_cache"]) == ("drop", "salt")
    assert drop["computed"] > 2 * 128
    assert salt["computed"] == 2


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("awex") is None, reason="awex is not installed")
def test_awex_and_ours_bring_the_same_uneven_shards(tmp_path: Path) -> None:
    asked = ["--only", "awex", "--cpu", "--ranks", "3:1", "--rounds", "1"]
    (ours, theirs), _ = measured("bench_peers", *asked, out=tmp_path / "peers.json")
    assert (ours["system"], theirs["system"]) == ("ours", "awex")
    assert ours["shards"] == theirs["shards"] == "uneven"
    assert ours["GB"] == theirs["GB"]


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["torch", "vllm", "sglang"])
def test_the_layers_of_an_engines_updates_are_measured_and_its_weights_right(
    tmp_path: Path, engine: str
) -> None:
    """Without GPUs, only SGLang has a way of its own."""
    if not importlib.util.find_spec(engine):
        pytest.skip(f"{engine} is not installed")
    asked = ["--cpu", "--engine", engine, "--model", "tiny", "--rounds", "1", "--each-rounds", "1"]
    asked += ["--part-timeout", str(patient(350)), "--bucket-mib", "0"]
    found, _ = measured("bench_latency", *asked, out=tmp_path / "latency.json")
    rows = {row["way"]: row for row in found}
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


@pytest.mark.faults
def test_readmes_loop_is_measured_with_its_settings(tmp_path: Path) -> None:
    asked = ["--cpu", "--engine", "torch", "--model", "tiny", "--way", "loop", "--rounds", "2"]
    (row,), _ = measured("bench_latency", *asked, out=tmp_path / "loop.json")
    assert row["way"] == "loop"
    assert row["last report"]["verified"]


def measured(module: str, *asked: str, out: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what went to stderr."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *asked, "--json", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patient(390), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert "notes" not in record, record["notes"]
    return record["rows"], done.stderr
