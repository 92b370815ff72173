"""verl's own trainer on one GPU, its rollout on another, with the manager on WeightSync."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.gpu.own_process import ROOT, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl is not installed"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.timeout(900),
]


def test_three_steps_of_separate_async(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    run("tests.contract.verl_run", "trainer", str(tmp_path), env=own)
