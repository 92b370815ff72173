"""The workflow of the repository: it runs the gate that a contributor runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    (path,) = (ROOT / ".github/workflows").iterdir()
    return yaml.safe_load(path.read_text())


def test_the_workflow_runs_the_gate_and_nothing_else(workflow: dict[Any, Any]) -> None:
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    actions = [step["uses"].split("@")[0] for step in job["steps"] if "uses" in step]
    assert actions == ["actions/checkout", "actions/setup-python"]


def test_the_workflow_may_only_read_and_ends(workflow: dict[Any, Any]) -> None:
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in job
    assert workflow["concurrency"]["cancel-in-progress"]
    assert job["timeout-minutes"] <= 90


def test_the_workflow_caches_what_setup_installs(workflow: dict[Any, Any]) -> None:
    (job,) = workflow["jobs"].values()
    (setup,) = (
        step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/setup-python")
    )
    assert (setup["python-version"], setup["cache"]) == ("3.11", "pip")
    assert all([*ROOT.glob(pattern)] for pattern in setup["cache-dependency-path"].split())
