"""verl's own trainers and rollouts get their weights through weightsync, in an environment that has verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed

VLLM = "0.29.0"
SETTINGS = {
    "VERL_USE_EXTERNAL_MODULES": "tests.contract.verl_on_cpus",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP2 engine is registered for GPUs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
@pytest.mark.parametrize("what", ["fleet", "trainer", "one_step"])
def test_verls_rollouts_have_the_trainers_weights(what: str, tmp_path: Path) -> None:
    python = environment(VLLM, "verl==0.9.1", "TransferQueue==0.1.11")
    # verl looks for a distribution called vllm, and here is vllm-cpu.
    info = tmp_path / "vllm-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: vllm\nVersion: {VLLM}+cpu\n")
    run_module(python, "verl_run", what, tmp_path, path=[tmp_path], limit_s=900, **SETTINGS)
