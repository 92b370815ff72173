"""The checkpoint engine in verl's own registry, between processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl is not installed")
def test_weights_move_between_ranks_of_verls() -> None:
    command = [sys.executable, "-m", "tests.contract.verl_processes"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
