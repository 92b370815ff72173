"""The command that a newcomer runs, from the outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def weightsync(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipes.cli", *args],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_does_its_work_and_reports_it(tmp_path: Path) -> None:
    small = ["engines.main.kind=torch", "loop.steps=2", "loop.prompts_per_step=4", "loop.target_reward=0"]
    sets = [part for setting in small for part in ("--set", setting)]
    done = weightsync("run", "quickstart", *sets, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    assert "2 of 2" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [step["version"] for step in report["steps"]] == [2, 3]
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2]]
    assert all(step["verified"] and step["bytes"] > 1e6 for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 3, "main-1": 3}
    assert report["heals"] == []
    assert {"seed", "host", "packages", "name"} <= set(report)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for args, named in (
        (("--set", "engines.main.tensor_parallel_size=3"), "engines.main.tensor_parallel_size: 3"),
        (("--set", "loop.prompts_per_step=2", "--set", "engines.main.count=3"), "loop.prompts_per_step: 2"),
        (("--set", "engines.main.kind=sglang"), "engines.main.kind: 'sglang'"),
        (("--out", str(tmp_path / "file" / "run")), "--out: "),
    ):
        done = weightsync("run", "quickstart", *args)
        assert done.returncode == 2
        assert named in done.stderr
        assert len(done.stderr.splitlines()) == 1
