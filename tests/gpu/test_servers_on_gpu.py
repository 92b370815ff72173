"""A `vllm serve` that Ray did not start, on a GPU that it shares with the trainer."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.gpu.own_process import ROOT, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed"),
    pytest.mark.timeout(420),
]


def test_a_server_joins_is_updated_under_requests_and_comes_back(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    run("tests.contract.server_run", str(tmp_path), env=own)
