"""Deadlines of tests: one factor for all of them, and a hang still ends."""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import patience
from tests.fleets import local_cluster
from tests.patience import FACTOR, VARIABLE, patient

ROOT = Path(__file__).parents[3]
LEAST_S = 2.0
"""Shorter waits are meant to fire."""
WAITING_METHODS = ("settle", "result", "exception", "join", "wait", "communicate", "until")
WAITING_KEYWORDS = ("timeout", "timeout_s", "connect_timeout_s", "heartbeat_s")
VALUES_ALONE = ("tests/unit/test_config.py", "tests/unit/project/test_patience.py")
"""Files whose settings nobody waits by."""


def pytest_in(folder: Path, test: str, factor: str) -> subprocess.CompletedProcess[str]:
    """What pytest says of `test`, under this suite's own configuration."""
    (folder / "test_one.py").write_text(test)
    (folder / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    configured = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *configured, "test_one.py"],
        env=os.environ | {VARIABLE: factor, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )


HANGING = """
import threading
import pytest

def test_of_the_common_limit():
    threading.Event().wait()

@pytest.mark.timeout(40)
def test_of_a_limit_of_its_own():
    threading.Event().wait()
"""


def test_a_hanging_test_is_ended_within_its_limit_times_the_factor(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = pytest_in(tmp_path, HANGING, "0.01")
    assert done.returncode == 1, done.stderr
    assert "Timeout (>1.2s) from pytest-timeout" in done.stdout
    assert "Timeout (>0.4s) from pytest-timeout" in done.stdout
    assert 1.6 < time.monotonic() - begun < patient(20)


def test_a_deadline_is_multiplied_by_the_factor() -> None:
    assert patient(30) == 30 * FACTOR


@pytest.mark.parametrize("given", ["0", "-1", "long", "inf", "nan", ""])
def test_a_factor_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{given}', give a number above 0"):
        patience._factor()


def bare_deadlines(source: str) -> Iterator[int]:
    """Lines that wait for a number of seconds that is not multiplied."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [word.value for word in node.keywords if word.arg in WAITING_KEYWORDS]
            given += node.args[-1:] if name in WAITING_METHODS else []
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call):
            is_sum = isinstance(node.op, ast.Add) and ast.unparse(node.left) == "time.monotonic()"
            given = [node.right] if is_sum else []
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
            given = [node.value] if ast.unparse(node.targets[0]).endswith("TIMEOUT_S") else []
        else:
            continue
        numbers = [each.value for each in given if isinstance(each, ast.Constant)]
        if any(isinstance(each, (int, float)) and each >= LEAST_S for each in numbers):
            yield node.lineno


def test_no_test_waits_for_a_bare_number_of_seconds() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in VALUES_ALONE
        for line in bare_deadlines(path.read_text())
    ]
    assert not found, f"write patient(…) of tests/patience.py for the seconds: {', '.join(found)}"


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("sync.settle(30)", True),
        ("sync.settle(patient(30))", False),
        ("ray.get(answer, timeout=60.0)", True),
        ("until(lambda: True, 20)", True),
        ("deadline = time.monotonic() + 10", True),
        ("TIMEOUT_S = 10.0", True),
        ("SyncConfig(timeout_s=5)", True),
        ("waiting.result(0.2)", False),
        ("', '.join(names)", False),
    ],
)
def test_a_bare_deadline_is_found(line: str, bare: bool) -> None:
    assert bool([*bare_deadlines(line)]) is bare


@pytest.mark.parametrize(
    ("problem", "num_starts"),
    [("The current node timed out during startup. This", 3), ("no such folder", 1)],
)
def test_ray_is_started_again_where_its_own_deadline_was_too_short(
    monkeypatch: pytest.MonkeyPatch, problem: str, num_starts: int
) -> None:
    problems = [problem] * 2
    started: list[object] = []

    def init(**settings: object) -> None:
        started.append(settings)
        if problems:
            raise RuntimeError(problems.pop())

    monkeypatch.setattr(local_cluster.ray, "init", init)
    monkeypatch.setattr(local_cluster.ray, "shutdown", lambda: None)
    if num_starts == 1:
        with pytest.raises(RuntimeError, match=problem):
            local_cluster.start_ray()
    else:
        local_cluster.start_ray()
    assert len(started) == num_starts


def test_processes_that_ray_gave_up_on_end_and_do_not_warn_in_another_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []

    def init(**_: object) -> None:
        if left:
            return
        process = subprocess.Popen(["sleep", "60"])
        left.append(process.pid)
        cycle: list[object] = [process]
        cycle.append(cycle)
        raise RuntimeError(local_cluster.TOO_LATE)

    monkeypatch.setattr(local_cluster.ray, "init", init)
    monkeypatch.setattr(local_cluster.ray, "shutdown", lambda: None)
    local_cluster.start_ray()
    gc.collect()
    with suppress(ChildProcessError):  # somebody has waited for it
        assert os.waitpid(left[0], 0)[1] == signal.SIGKILL
