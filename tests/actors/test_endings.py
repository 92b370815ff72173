"""However a run ends, nothing of it is left: no process, no socket, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from tests.patience import patient

MARK = "WEIGHTSYNC_TEST_RUN"


def processes(mark: str) -> dict[int, str]:
    """Command lines of a run's processes, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            # Ray's own agents take minutes to see that their raylet was killed.
            command = (entry / "cmdline").read_bytes().decode()
            if "DashboardAgent" not in command and "RuntimeEnvAgent" not in command:
                found[int(entry.name)] = command
        except OSError:
            continue  # it ended while we looked
    return found


def our_files() -> set[str]:
    return {
        str(path)
        for folder in (tempfile.gettempdir(), "/dev/shm")
        for path in Path(folder).glob("weightsync*")
    }


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
def test_nothing_is_left(ending: str, how: str) -> None:
    mark, before = uuid.uuid4().hex, our_files()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fleets.driver", how],
        env=os.environ | {MARK: mark},
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
    while (files := our_files() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not files
