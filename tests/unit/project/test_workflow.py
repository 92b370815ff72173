"""The workflows of the repository: one runs the gate that a contributor runs, one publishes releases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return _workflow("ci")


def _workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())


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
    assert (setup["python-version"], setup["cache"]) == ("${{ matrix.python-version }}", "pip")
    assert all([*ROOT.glob(pattern)] for pattern in setup["cache-dependency-path"].split())


def test_the_gate_runs_on_the_oldest_and_the_newest_python_that_setup_promises(
    workflow: dict[Any, Any],
) -> None:
    (job,) = workflow["jobs"].values()
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text())
    assert job["strategy"]["matrix"]["python-version"] == [promised[0], promised[-1]]
    assert f'python_requires=">={promised[0]}"' in (ROOT / "setup.py").read_text()


def test_only_the_step_that_publishes_a_release_gets_an_identity() -> None:
    published = _workflow("publish")
    assert published[True] == {"release": {"types": ["published"]}}, "YAML reads `on` as true"
    assert published["permissions"] == {"contents": "read"}
    assert published["jobs"]["publish"]["permissions"] == {"contents": "read", "id-token": "write"}
