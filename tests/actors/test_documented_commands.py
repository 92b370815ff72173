"""The shell commands of the documentation, `ray job submit`, and `weightsync doctor --cluster`.

Documented commands are parsed by default, and on demand run on a machine of their own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.fleets.fresh_machine import on_a_fresh_machine, why_not
from tests.fleets.leftovers import MARK, our_files, processes
from tests.fleets.local_cluster import forking_python
from tests.patience import patient
from weightsync.recipes import cli

ROOT = Path(__file__).parents[2]
A_TOKEN_IS_THERE = "ray get-auth-token --generate\n"
A_LOOP_RAN_BEFORE = "python -c 'import ray; ray.init(include_dashboard=False); ray.shutdown()'\n"
"""It leaves a token in the home folder, and says so nowhere."""


@pytest.fixture(scope="module")
def machine() -> None:
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


def arguments(block: str) -> list[list[str]]:
    """The words of each command of a block. Variables are not replaced."""
    lines = block.replace("\\\n", " ").splitlines()
    found = [[*dropwhile(_assigns, shlex.split(line, comments=True))] for line in lines]
    return [words for words in found if words and words[0] != "export"]


def _assigns(word: str) -> bool:
    return re.match(r"\w+=", word) is not None


def rays_own() -> Any:
    """Return Ray's command. Importing it takes half a second, in each process that collects tests."""
    import ray.scripts.scripts

    return ray.scripts.scripts.cli


def parse(words: list[str]) -> None:
    """Raise if a command of ours or Ray's, or the job in it, does not take its arguments."""
    if words[:3] == ["python", "-m", cli.__name__]:
        words = ["weightsync", *words[3:]]
    command: Any = rays_own() if words[0] == "ray" else typer.main.get_command(cli.app)
    at = 1
    while hasattr(command, "commands"):
        assert words[at] in command.commands, words
        command, at = command.commands[words[at]], at + 1
    command.make_context(words[at - 1], words[at:])
    if "--" in words:
        parse(words[words.index("--") + 1 :])


def test_every_command_for_a_cluster_is_one_that_there_is() -> None:
    blocks = commands("recipes/README.md", "On a Ray cluster") + commands(
        "recipes/README.md", "When the driver dies"
    )
    found = [words for block in blocks for words in arguments(block)]
    assert sum(words[:3] == ["ray", "job", "submit"] for words in found) == 3
    assert ["weightsync", "run", "quickstart", "--set", "resume=true"] in found
    for words in found:
        parse(words)
    with pytest.raises(Exception, match="No such option"):
        parse(["ray", "job", "submit", "--", "weightsync", "doctor", "--jason"])


@pytest.mark.faults
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(150)
def test_a_cluster_is_started_and_takes_a_job_where_a_token_was_written() -> None:
    first, *_ = commands("recipes/README.md", "On a Ray cluster")
    said = run(A_TOKEN_IS_THERE + first, 140)
    assert re.search(r"ok +ray cluster +127\.0\.0\.1:6379: ", said)
    assert "succeeded" in said.splitlines()[-2]


@pytest.mark.faults
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("before", ["", A_LOOP_RAN_BEFORE], ids=["no token", "a loop ran before"])
def test_every_command_for_a_cluster_works(before: str) -> None:
    start, *jobs = commands("recipes/README.md", "On a Ray cluster")
    (resumed,) = commands("recipes/README.md", "When the driver dies")
    said = run(before + start + "".join(jobs) + resumed, 950)
    assert said.count("colocated_grpo: done") == 2
    assert said.count("quickstart: done") == 1


@pytest.mark.faults
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(300)
def test_a_run_takes_the_cluster_of_a_shell_that_knows_no_token() -> None:
    """Ray finds a token by itself for ``auto``, and the cluster has taken it without being told."""
    said = run(A_LOOP_RAN_BEFORE + "ray start --head\nRAY_ADDRESS=auto weightsync doctor\n", 280)
    assert re.search(r"ok +ray cluster +auto: ", said)


RUN = (sys.executable, "-m", "weightsync.recipes.cli", "run", "recipes/colocated_grpo.yaml")
SMALL = ("--set", "engines.main.kind=torch", "--set", "loop.prompts_per_step=4")


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


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_job_is_followed_to_its_success(jobs: Jobs, tmp_path: Path) -> None:
    steps = ("--set", "loop.steps=2", "--set", "loop.target_reward=0")
    code, log = jobs.submit(*RUN, *SMALL, *steps, "--out", str(tmp_path / "run"))
    assert code == 0, log
    assert "step 2/2" in log
    assert "succeeded" in log
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["status"], report["steps"][-1]["engines"]) == ("done", {"main-0": 3, "main-1": 3})


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_bad_input_is_a_failure_with_its_own_code(jobs: Jobs) -> None:
    script = "from weightsync.recipes import cli; print('ours:', cli.__file__); cli.app(['run', 'quikstart'])"
    code, log = jobs.submit(sys.executable, "-c", script)
    assert code == 1
    assert "exit code 2" in log
    assert "did you mean 'quickstart'?" in log
    shipped = next(line for line in log.splitlines() if line.startswith("ours: "))
    assert "runtime_resources" in shipped  # what was sent, and no installation


@pytest.mark.faults
@pytest.mark.timeout(400)
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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_node_and_pair_is_shown_and_a_stopped_node_is_named() -> None:
    done = subprocess.run(
        [forking_python(), "-m", "tests.fleets.examined"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--address", "127.0.0.1:6"], "--address: '127.0.0.1:6' is not valid; give auto"),
        (["--address", "127.0.0.1:head"], "--address: '127.0.0.1:head' is not valid; give auto"),
        (["--ports", "20000"], "--ports: '20000' is not valid; give the first and the last port"),
        (["--ports", "20100-20000"], "the nearest range is 20000-20100"),
        (["--timeout", "0"], "--timeout: 0.0 is not valid; give seconds above 0"),
    ],
)
def test_bad_input_is_named(options: list[str], says: str) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--cluster", *options])
    assert (result.exit_code, says in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("option", ["--address", "--ports", "--timeout"])
def test_options_of_a_cluster_need_it(option: str) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", option, "1"])
    assert result.exit_code == 2
    assert "it goes with --cluster" in result.stderr
