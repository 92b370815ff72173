"""A driver is killed, and the next one goes on with what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient

PHASES = ("publish", "pause", "move", "verify", "commit", "keep", "refill")


class Process:
    """A cluster, or a driver."""

    def __init__(self, module: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.actors.{module}", *args],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def reports(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.says())
        return report

    def ended(self) -> None:
        """It has killed itself."""
        assert self._process.wait(timeout=patient(60)) == -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Let it end, once what it has to say has been read."""
        self._process.communicate(timeout=patient(60))


@contextmanager
def process(module: str, *args: str) -> Iterator[Process]:
    running = Process(module, *args)
    try:
        yield running
        running.close()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with process("lasting_cluster") as lasting:
        yield lasting.says()


@pytest.mark.faults
@pytest.mark.timeout(120)
def test_the_next_driver_goes_on_where_the_last_was_killed(address: str) -> None:
    with process("lasting", "first", address) as first:
        before = first.reports()
        assert before["version"] == 3
        first.kill()  # idle
    with process("lasting", "second", address) as second:
        found = second.reports()
        assert found == before, "nobody was started, written or lost"
        midway = second.reports()
        assert midway["version"] == 4
        assert midway["states"]["e1"] == "WRITING"
        assert not midway["exact"]["e1"]
        second.kill()  # an engine still waits in a bucket of version 5
    os.kill(before["pids"]["e0"], signal.SIGKILL)
    with process("lasting", "third", address) as third:
        found = third.reports()
        assert found["version"] == 4
        assert found["engines"] == {"e0": 4, "e1": 4}
        assert found["serving"] == ["e0", "e1"]
        assert found["exact"] == {"e0": True, "e1": True}
        assert found["loads"] == {"e0": 1, "e1": 6}
        others = before["pids"].keys() - {"e0"}
        assert {name: found["pids"][name] for name in others} == {
            name: before["pids"][name] for name in others
        }
        updated = third.reports()
        assert updated["version"] == 5
        assert updated["exact"] == {"e0": True, "e1": True}
        ended = third.reports()
    names = [name.removeprefix("weightsync/lasting/") for name in ended["left"]]
    assert names == ["engine e0", "engine e1", "trainer 0", "trainer 1"]
    assert ended["after"] == []
    _gone(*before["pids"].values())


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_driver_may_die_in_any_phase(address: str) -> None:
    """One after another: each finds exactly one committed version everywhere, and goes on with the next."""
    with process("lasting", "first", address) as first:
        before = first.reports()
        first.kill()
    committed = before["version"]
    for phase in (*PHASES, *PHASES):
        with process("lasting", phase, address) as driver:
            found = driver.reports()
            assert found["version"] in (committed, committed + 1), phase
            assert found["engines"] == dict.fromkeys(("e0", "e1"), found["version"]), phase
            assert found["exact"] == {"e0": True, "e1": True}, phase
            assert found["serving"] == ["e0", "e1"], phase
            assert found["pids"] == before["pids"], phase
            driver.ended()
            committed = found["version"]
    with process("lasting", "last", address) as last:
        found = last.reports()
        assert found["exact"] == {"e0": True, "e1": True}
        last.reports()
    _gone(*before["pids"].values())


def _gone(*pids: int) -> None:
    deadline = time.monotonic() + patient(10)
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
