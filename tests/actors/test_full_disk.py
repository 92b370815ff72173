"""A run whose disk is full: how it went is said first, what could not be written after it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

# Whole runs; the order of what is said is held by the unit tests of the command line, too.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs -o "size=$0" tmpfs "$1" && shift && exec "$@"'
SMALL = ["engines.main.kind=torch", "engines.main.count=1", "trainers.count=1", "loop.prompts_per_step=4"]


def start(out: Path, size: str, *args: str) -> subprocess.Popen[str]:
    """`weightsync run quickstart` into a file system of its own, `size` large, at `out`."""
    out.mkdir()
    sets = [part for setting in SMALL for part in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "weightsync.recipes.cli",
        "run",
        "quickstart",
        *sets,
        *args,
        "--out",
        str(out),
    ]
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", MOUNT, size, str(out), *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fill(folder: Path) -> None:
    """Until the last byte of its file system."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.fixture(scope="module", autouse=True)
def may_mount() -> None:
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if os.geteuid() or tried.returncode:
        pytest.skip("a full disk takes a file system that only root can mount")


def test_a_run_that_did_its_work_says_so_before_what_it_could_not_write(tmp_path: Path) -> None:
    out = tmp_path / "run"
    sets = ["--set", "loop.steps=6", "--set", "loop.target_reward=0", "--trace"]
    with start(out, "16m", *sets) as run:
        assert run.stdout is not None
        before = []
        for line in run.stdout:
            before.append(line)
            if line.startswith("step 1/6"):
                fill(Path(f"/proc/{run.pid}/root{out}"))
                break
        said, complained = run.communicate()
    assert run.returncode == 1, "".join(before) + said + complained
    assert "quickstart: done" in said
    assert "6 of 6" in said
    assert "report: " not in said
    names = "report.json, report.html, trace.json, logs"
    assert complained == f"weightsync: could not write {names} in {out}: No space left on device\n"


def test_a_disk_without_room_for_the_model_is_said_first(tmp_path: Path) -> None:
    with start(tmp_path / "run", "64k") as run:
        _, complained = run.communicate()
    first, *rest = complained.splitlines()
    assert run.returncode == 2
    assert first.startswith(
        f"weightsync: --out: '{tmp_path}/run/model' is not valid; give a folder with room"
    )
    assert "No space left on device" in first
    assert all("could not write " in line for line in rest)
    assert len(rest) <= 1
