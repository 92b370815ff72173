"""A server that Ray did not start, on a GPU that it shares with the trainer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.gpu.own_process import ROOT, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_joins_is_updated_under_requests_and_comes_back(tmp_path: Path, kind: str) -> None:
    if not importlib.util.find_spec(kind):
        pytest.skip(f"{kind} is not installed")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    run("tests.contract.server_run", str(tmp_path), kind, env=own)
