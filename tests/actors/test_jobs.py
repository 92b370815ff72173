"""`ray job submit` from an empty folder, to a cluster that has nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.test_endings import MARK, our_files, processes
from tests.patience import patient

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "weightsync.recipes.cli", "run", "recipes/colocated_grpo.yaml")
SMALL = ("--set", "engines.main.kind=torch", "--set", "loop.prompts_per_step=4")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("empty")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = str(int(patient(20)))  # a busy machine closes a fleet slowly
    with subprocess.Popen(
        [sys.executable, ROOT / "tests/fleets/lasting_cluster.py", "dashboard"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        try:
            jobs = Jobs(f"http://{cluster.stdout.readline().strip()}", folder, environment)
            deadline = time.monotonic() + patient(120)
            while (first := jobs("submit", "--no-wait", "--", "true"))[0]:  # until the host's agent is up
                assert time.monotonic() < deadline, first[1]
            yield jobs
        finally:
            cluster.communicate(timeout=patient(60))


class Jobs:
    """`ray job …` as it is typed; packages and a mark travel in the runtime environment."""

    def __init__(self, address: str, folder: Path, environment: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self._address, self._folder, self._environment = address, folder, environment
        packages = [str(ROOT / "weightsync")]
        self._shipped = json.dumps({"py_modules": packages, "env_vars": {MARK: self.mark}})

    def submit(self, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        return self("submit", "--runtime-env-json", self._shipped, *options, "--", *command)

    def __call__(self, what: str, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "job",
                what,
                "--address",
                self._address,
                *arguments,
            ],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patient(180),
            check=False,
        )
        return done.returncode, done.stdout


def test_a_job_is_followed_to_its_success(jobs: Jobs, tmp_path: Path) -> None:
    steps = ("--set", "loop.steps=2", "--set", "loop.target_reward=0")
    code, log = jobs.submit(*RUN, *SMALL, *steps, "--out", str(tmp_path / "run"))
    assert code == 0, log
    assert "step 2/2" in log
    assert "succeeded" in log
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["status"], report["steps"][-1]["engines"]) == ("done", {"main-0": 3, "main-1": 3})


def test_bad_input_is_a_failure_with_its_own_code(jobs: Jobs) -> None:
    script = "from weightsync.recipes import cli; print('ours:', cli.__file__); cli.app(['run', 'quikstart'])"
    code, log = jobs.submit(sys.executable, "-c", script)
    assert code == 1
    assert "exit code 2" in log
    assert "did you mean 'quickstart'?" in log
    shipped = next(line for line in log.splitlines() if line.startswith("ours: "))
    assert "runtime_resources" in shipped  # what was sent, and no installation


def test_a_job_that_is_stopped_leaves_nothing_behind(jobs: Jobs, tmp_path: Path) -> None:
    before, report = our_files(), tmp_path / "run" / "report.json"
    name = f"stopped-{jobs.mark[:8]}"
    command = (*RUN, *SMALL, "--set", "loop.steps=10000", "--out", str(tmp_path / "run"))
    code, log = jobs.submit(*command, options=("--no-wait", "--submission-id", name))
    assert code == 0, log
    deadline = time.monotonic() + patient(180)
    while not report.exists() or len(json.loads(report.read_text())["steps"]) < 2:
        assert time.monotonic() < deadline, jobs("logs", name)[1]
        time.sleep(0.2)
    assert len(processes(jobs.mark)) > 6
    code, log = jobs("stop", name)
    assert code == 0, log
    assert "was stopped" in jobs("status", name)[1]
    assert "weightsync: interrupted" in jobs("logs", name)[1]
    assert json.loads(report.read_text())["status"] == "failed"
    deadline = time.monotonic() + patient(60)
    while (left := [*processes(jobs.mark).values(), *(our_files() - before)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
