"""However a run or a process ends, nothing of it is left, and a run whose disk is full says how it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import ray

from tests.fleets.actors import until
from tests.fleets.faulty import process_state
from tests.fleets.leftovers import MARK, our_files, processes
from tests.patience import patient
from weightsync.actors.ray.placement import Placement
from weightsync.actors.ray.process import end_process


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ending", "how"),
    [
        pytest.param("normal", "normal", marks=pytest.mark.faults),
        pytest.param("ctrl-c", "forever", marks=pytest.mark.faults),
        ("kill -9", "forever"),
        pytest.param("kill -9", "connecting", marks=pytest.mark.faults),
    ],
)
def test_nothing_is_left(ending: str, how: str, tmp_path: Path) -> None:
    # Of its own: other tests leave files for as long as they run.
    own = {"TMPDIR": str(tmp_path), "RAY_TMPDIR": tempfile.gettempdir()}
    mark, before = uuid.uuid4().hex, our_files(str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fleets.driver", how],
        env=os.environ | {MARK: mark} | own,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "now\n"
        assert len(processes(mark)) > 5
        if ending != "normal":
            driver.send_signal(signal.SIGINT if ending == "ctrl-c" else signal.SIGKILL)
        status = driver.wait(patient(60))
    assert (status == 0) == (ending == "normal")
    deadline = time.monotonic() + patient(60)
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    while (files := our_files(str(tmp_path)) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not files


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_what_an_actor_started_ends_with_it_and_its_shared_memory_is_freed(
    cluster: None, is_stopped: bool
) -> None:
    class Sharing:
        """As an engine that talks with its ranks."""

        def start(self) -> tuple[str, list[int]]:
            self.memory = SharedMemory(create=True, size=4096)
            self.rank = subprocess.Popen(["sleep", "600"])
            return self.memory.name, [os.getpid(), self.rank.pid]

    actor = ray.remote(Sharing).options(num_cpus=0).remote()
    name, pids = ray.get(actor.start.remote())
    if is_stopped:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert (Path("/dev/shm") / name).exists()
    end_process(actor, [Placement(ray.get_runtime_context().get_node_id(), "", "", pids[0])])
    assert not any(map(process_state, pids))
    assert until(lambda: not (Path("/dev/shm") / name).exists(), patient(10))


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


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("may_mount")
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


@pytest.mark.faults
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("may_mount")
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
