"""The shell commands of the documentation: parsed by default, and on demand run on a machine of their own."""

from __future__ import annotations

import re
import shlex
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.fleets.fresh_machine import on_a_fresh_machine, why_not
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
