"""The command that a newcomer runs, from the outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.fleets.local_cluster import forking_python

ROOT = Path(__file__).parents[2]


def weightsync(
    *args: str, cwd: str | Path = "/", python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [python, "-m", "weightsync.recipes.cli", *args],
        env=os.environ | {"PYTHONPATH": path} | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "is_started",
    [
        pytest.param(True, id="its own cluster", marks=pytest.mark.faults),
        pytest.param(False, id="one that runs"),
    ],
)
def test_a_short_run_does_its_work_and_reports_it(tmp_path: Path, is_started: bool) -> None:
    started = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "python": forking_python()}
    joined = {} if is_started else started
    small = ["engines.main.kind=torch", "loop.steps=2", "loop.prompts_per_step=4", "loop.target_reward=0"]
    sets = [part for setting in small for part in ("--set", setting)]
    done = weightsync("run", "quickstart", *sets, "--trace", "--out", str(tmp_path / "run"), **joined)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = "start Ray: " if is_started else "join the Ray cluster: "
    assert done.stdout.startswith(ours), "no library speaks first"
    assert "step 2/2" in done.stdout
    assert "2 of 2" in done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [step["version"] for step in report["steps"]] == [2, 3]
    assert [step["rollout_versions"] for step in report["steps"]] == [[1], [2]]
    assert all(0 <= step["mismatch_kl"] <= step["mismatch"] < 1e-5 for step in report["steps"])
    assert all(step["verified"] and step["bytes"] > 1e6 for step in report["steps"])
    assert report["steps"][-1]["engines"] == {"main-0": 3, "main-1": 3}
    assert report["heals"] == []
    assert done.stdout.count("engine          component  tensors") == 2  # first version, and the end
    assert re.search(r"main-0, main-1  model +25 +1\.25 MB  broadcast  (load|identity) +3 ", done.stdout)
    assert f"start 2 trainers and 2 engines on {report['devices']}:" in done.stdout
    assert {"seed", "host", "packages", "name"} <= set(report)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    logs = {each.name.rpartition("-")[0] for each in (tmp_path / "run" / "logs").iterdir()}
    assert {"EngineActor-main-0", "EngineActor-main-1", "GrpoTrainer-0", "holder-0"} <= logs
    assert {link["distance"] for link in report["links"]} == {"same GPU or slot", "same host"}
    assert sum(link["nbytes"] for link in report["links"]) >= 2 * report["steps"][-1]["bytes"]
    assert "2 of 2" in (tmp_path / "run" / "report.html").read_text()
    holds_the_spans_of_three_updates(json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"])


def holds_the_spans_of_three_updates(events: list[dict[str, Any]]) -> None:
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == [
        "driver",
        *(f"engine main-{i} rank 0" for i in (0, 1)),
        *(f"holder {i}" for i in (0, 1)),
        *(f"trainer {i}" for i in (0, 1)),
    ]
    for version in (1, 2, 3):
        spans = {
            (tracks[e["pid"], e["tid"]], e["name"]): (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and e["args"]["version"] == version
        }
        # On one host all clocks are one: what a rank does lies inside the driver's phase.
        for (name, what), (begin, end) in spans.items():
            phase = "publish" if what == "publish" else "move"
            if name != "driver":
                assert spans["driver", phase][0] - 1000 <= begin < end <= spans["driver", phase][1] + 1000
        assert {what for name, what in spans if name == "engine main-1 rank 0"} == {"load", "verify"}


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = weightsync("run", "quickstart", "--out", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert "--out: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
