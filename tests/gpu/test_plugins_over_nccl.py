"""The plug-ins for vLLM's own weight transfer and for verl, from one GPU to another."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.qwen3_models import save_qwen3
from tests.gpu.same_answers import assert_same
from tests.gpu.test_vllm import from_disk, served
from tests.patience import patient

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


def run(module: str, *arguments: str, path: tuple[Path, ...] = ()) -> None:
    found = os.pathsep.join([str(ROOT), *map(str, path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    sys.stdout.write(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_vllm_holds_what_the_trainer_sent(tmp_path: Path) -> None:
    paths = [tmp_path / str(seed) for seed in range(2)]
    for seed, path in enumerate(paths):
        save_qwen3(path, "untied", seed)
    answers, link = from_disk(str(paths[1]), 1), served(str(paths[1]))
    egg_info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(egg_info, cwd=ROOT, check=True, capture_output=True)
    run("tests.gpu.vllm_transfer_over_nccl", str(tmp_path), str(paths[0]), link, path=(tmp_path,))
    (held,), (wanted,) = (json.loads((folder / "live.json").read_text()) for folder in (tmp_path, paths[1]))
    assert [name for name in wanted if held[name] != wanted[name] and ".attn._" not in name] == []
    assert_same(json.loads((tmp_path / "answers.json").read_text()), answers)


@pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="verl is not installed")
def test_verls_manager_moves_weights_from_update_to_update(tmp_path: Path) -> None:
    run("tests.gpu.verl_over_nccl", str(tmp_path))
