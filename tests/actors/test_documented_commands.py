"""The shell commands of the documentation, to the letter, on a machine on which nothing runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.actors.fresh_machine import on_a_fresh_machine, why_not

ROOT = Path(__file__).parents[2]
A_TOKEN_IS_THERE = "ray get-auth-token --generate\n"
A_LOOP_RAN_BEFORE = "python -c 'import ray; ray.init(include_dashboard=False); ray.shutdown()'\n"
"""It leaves a token in the home folder, and says so nowhere."""


@pytest.fixture(scope="module", autouse=True)
def _a_machine_can_be_had() -> None:
    if problem := why_not():
        pytest.skip(problem)


def commands(file: str, heading: str) -> list[str]:
    """The blocks of shell commands below `heading`, up to the next one."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", (ROOT / file).read_text(), re.M | re.S)
    assert found, f"{file} has no heading {heading!r}"
    return re.findall(r"^```sh\n(.*?)^```", found[1], re.M | re.S)


def run(script: str, timeout_s: float) -> str:
    done = on_a_fresh_machine(script, timeout_s)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(150)
def test_a_cluster_is_started_and_takes_a_job_where_a_token_was_written() -> None:
    first, *_ = commands("recipes/README.md", "On a Ray cluster")
    said = run(A_TOKEN_IS_THERE + first, 140)
    assert "ok       ray cluster       127.0.0.1:6379: " in said
    assert "succeeded" in said.splitlines()[-2]


@pytest.mark.faults
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("before", ["", A_LOOP_RAN_BEFORE], ids=["no token", "a loop ran before"])
def test_every_command_for_a_cluster_works(before: str) -> None:
    start, *jobs = commands("recipes/README.md", "On a Ray cluster")
    (resumed,) = commands("recipes/README.md", "When the driver dies")
    said = run(before + start + "".join(jobs) + resumed, 950)
    assert said.count("colocated_grpo: done") == 2
    assert said.count("quickstart: done") == 1


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_run_takes_the_cluster_of_a_shell_that_knows_no_token() -> None:
    """Ray finds a token by itself for ``auto``, and the cluster has taken it without being told."""
    said = run(A_LOOP_RAN_BEFORE + "ray start --head\nRAY_ADDRESS=auto weightsync doctor\n", 280)
    assert "ok       ray cluster       auto: " in said
