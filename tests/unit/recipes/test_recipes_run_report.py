from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.recipes.test_recipes_page import run_report
from tests.unit.test_report import REPORT
from weightsync.errors import StateError
from weightsync.recipes.report.run_report import RunReport, StepRow, read_report


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
            "committed_at": 0.0,
            "gb_per_s": 0.0,
            "phases": {},
            "routes": {},
            "proofs": {},
            "failures": {},
            "retried": "",
            "acceptance": None,
            "mismatch": None,
            "mismatch_kl": None,
        }
    ]
    assert read["heals"] == []
    assert "torch" in read["packages"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (StateError("trainer 0 is gone"), "trainer 0 is gone"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_that_fails_says_why(error: BaseException, why: str) -> None:
    report = RunReport(name="quickstart", seed=3)
    report.fail(error)
    assert (report.status, report.error) == ("failed", why)


def test_what_fails_after_the_result_does_not_change_it() -> None:
    report = RunReport(name="quickstart", seed=3, status="done")
    report.fail(StateError("closed"))
    assert (report.status, report.error) == ("done", "")


def test_everything_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = run_report()
    report.spans = {name: list(spans) for name, spans in report.spans.items()}
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report


def test_a_row_says_what_the_update_said() -> None:
    made = StepRow.of(
        6, 0.5, [6], REPORT, "the first try failed", 0.5, {"loss": 0.1, "mismatch": 1e-3, "mismatch_kl": 1e-6}
    )
    assert (made.step, made.version, made.bytes, made.sync_seconds) == (6, 7, 16_400_000_000, 0.5)
    assert made.phases == {"publish": 0.1, "move": 0.2}
    assert made.failures == {"e2": "engine e2 failed in move: out of memory"}
    assert (made.gb_per_s, made.retried) == (REPORT.gb_per_s, "the first try failed")
    assert (made.acceptance, made.mismatch, made.mismatch_kl) == (0.5, 1e-3, 1e-6)
    assert abs(made.committed_at - time.time()) < 60


def test_a_report_replaces_the_last_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for seed in (1, 2):
        RunReport(name="x", seed=seed).write(path)
    assert json.loads(path.read_text())["seed"] == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_leaves_the_last(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    RunReport(name="x", seed=1).write(path)
    broken = RunReport(name="x", seed=2, heals=[object()])
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
