"""The examples, run as a user runs them, and what makes a file an example."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.fleets.local_cluster import TOO_LATE
from tests.patience import patient

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
ALLOWED = {*sys.stdlib_module_names, "ray", "torch", "transformers", "weightsync"}
UPDATE = re.compile(r"version (\d+)(?: \((\w+)\))?: \d+ kB to 2 of 2 engines in .* verified")
ANSWER = re.compile(r"  (e\d) serves (?:version )?(\w+): 1, 2, 3 -> \[([\d, ]+)\]")

needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
needs_no_gpu_or_four = pytest.mark.skipif(
    0 < torch.cuda.device_count() < 4, reason="four GPUs, or none, are needed"
)


def printed_by(name: str) -> str:
    """What `python examples/name` writes to its standard output, in a Ray cluster of its own.

    It is run again where the machine is too busy for Ray's own deadline.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    command = [sys.executable, f"examples/{name}"]
    deadline = time.monotonic() + patient(60)
    while True:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if TOO_LATE not in done.stderr or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answers(printed: str) -> dict[str, list[str]]:
    """The tokens of each version or checkpoint, from one engine after the other."""
    found: dict[str, list[str]] = {}
    for _, served, tokens in ANSWER.findall(printed):
        found.setdefault(served, []).append(tokens)
    return found


def check_that_both_learn_to_count(printed: str) -> None:
    assert [version for version, _ in UPDATE.findall(printed)] == list("12345")
    said = answers(printed)
    assert list(said) == list("12345")
    assert all(first == second for first, second in said.values())
    assert said["5"][0] == "4, 5, 6, 7, 8"


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_a_plain_module_is_served_by_two_engines() -> None:
    check_that_both_learn_to_count(printed_by("plain_module_cpu.py"))


@pytest.mark.faults
@pytest.mark.timeout(400)
@needs_vllm
@needs_no_gpu_or_four
def test_fsdp2_ranks_are_served_by_two_vllms() -> None:
    check_that_both_learn_to_count(printed_by("fsdp2_two_vllm.py"))


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_checkpoints_are_served_without_a_trainer() -> None:
    printed = printed_by("serve_checkpoints.py")
    assert UPDATE.findall(printed) == [("1", "base"), ("2", "tuned"), ("3", "base"), ("4", "tuned")]
    said = answers(printed)
    assert {name: len(tokens) for name, tokens in said.items()} == {"base": 4, "tuned": 4}
    assert all(len(set(tokens)) == 1 for tokens in said.values())
    assert said["base"] != said["tuned"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_uses_the_public_names_alone(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {
        module
        for node in imports
        for module in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert {module.split(".")[0] for module in modules} <= ALLOWED
    assert not {module for module in modules if module.startswith("weightsync.")}


def test_the_page_of_the_examples_lists_each_of_them() -> None:
    listed = re.findall(r"^\| \[`(\w+\.py)`\]", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]
