"""The checkpoint engine under verl's own manager."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl is not installed")
def test_verls_manager_moves_weights_from_update_to_update(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.contract.verl_fleet", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
