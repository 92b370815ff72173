from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.run_report import RunReport, StepRow


def row(step: int, reward: float) -> StepRow:
    return StepRow(
        step=step,
        version=step + 1,
        reward=reward,
        sync_seconds=0.01,
        bytes=4096,
        verified=True,
        engines={"main-0": step + 1},
        rollout_versions=[step],
    )


def test_a_report_reads_back_as_it_was_filled(tmp_path: Path) -> None:
    report = RunReport(name="quickstart", seed=3)
    report.engines["main-0"] = {"kind": "torch", "why": "asked for"}
    report.steps.append(row(1, 0.25))
    path = tmp_path / "deep" / "report.json"
    report.write(path)
    read = json.loads(path.read_text())
    assert set(read) >= {"name", "seed", "host", "packages", "started", "steps", "heals", "engines", "status"}
    assert read["steps"] == [
        {
            "step": 1,
            "version": 2,
            "reward": 0.25,
            "sync_seconds": 0.01,
            "bytes": 4096,
            "verified": True,
            "engines": {"main-0": 2},
            "rollout_versions": [1],
        }
    ]
    assert read["heals"] == []
    assert "torch" in read["packages"]


def test_a_report_replaces_the_last_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for seed in (1, 2):
        RunReport(name="x", seed=seed).write(path)
    assert json.loads(path.read_text())["seed"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_leaves_the_last(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    RunReport(name="x", seed=1).write(path)
    broken = RunReport(name="x", seed=2, heals=[{"engine": object()}])
    with pytest.raises(TypeError):
        broken.write(path)
    assert json.loads(path.read_text())["seed"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_final_reward_is_the_mean_of_the_last_five() -> None:
    report = RunReport(name="x", seed=0)
    assert report.final_reward == 0.0
    report.steps.extend(
        row(step, reward) for step, reward in enumerate([0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5], start=1)
    )
    assert report.final_reward == pytest.approx(0.9)
    assert report.first_reward == 0.0
