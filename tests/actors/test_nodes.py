"""Hosts that go away with all that is on them; in a process of its own, for a cluster of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", ["idle", "phases", "checkpoint", "deaf"])
def test_lost_hosts_are_survived_and_several_read_a_checkpoint(when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleets.nodes", when],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(380),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
