"""Families whose files, loaders or layers differ from Qwen3's: an engine has what one has that loaded files.

The tests of vLLM pass on its CPU build, too, if they are called there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.families import build_family
from tests.gpu import sglang_probe, test_sglang, test_vllm, vllm_probe
from tests.gpu.fed_engine import FedEngine
from tests.gpu.live_bytes import Live
from tests.gpu.same_answers import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(420),
]
FAMILIES = ("deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "llama", "mixtral", "olmoe", "qwen2")
LINEAR = ("qwen3_5", "qwen3_next")
IN_VLLM = (*FAMILIES, *LINEAR, "nemotron_h", "qwen3_vl")
IN_SGLANG = (*FAMILIES, "gemma2", "phi3", "qwen2_moe")


def save(folder: Path, family: str) -> tuple[list[str], list[PreTrainedModel]]:
    paths = [folder / str(seed) for seed in range(2)]
    models = [build_family(path, family, seed, torch.bfloat16) for seed, path in enumerate(paths)]
    return [str(path) for path in paths], models


def fed(rig: FedEngine, family: str, models: list[PreTrainedModel]) -> list[tuple[Any, Live]]:
    """Update an engine to each version, to the first of them twice. Returns what it says and holds."""
    is_vllm = hasattr(rig.engine, "call")
    found = []
    try:
        rig.connect(models[0])
        route = "live" if rig.layouts[0].buffers else "loader"
        sys.stdout.write(f"{family} in {'vLLM' if is_vllm else 'SGLang'}: {route}\n")
        addresses = rig.addresses()
        for model in (models[0], *models):
            rig.update(model)
            if is_vllm:
                found.append((rig.engine.call(vllm_probe.probe), rig.engine.call(vllm_probe.held)))
            else:
                found.append((sglang_probe.answers_of(rig.engine), sglang_probe.held_of(rig.engine)))
        if rig.layouts[0].device:  # a CPU's packed weights move
            assert rig.addresses() == addresses
    finally:
        rig.close()
    return found


def check(found: list[tuple[Any, Live]], answers: list[Any], held: list[Live]) -> None:
    assert answers[0] != answers[1]
    for number, (said, lives) in zip((0, 0, 1), found, strict=True):
        for live, wanted in zip(lives, held[number], strict=True):
            assert live.keys() == wanted.keys()
            assert [name for name in wanted if live[name] != wanted[name]] == []
        assert_same(said, answers[number])


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize("family", IN_VLLM)
def test_vllm_has_what_one_has_that_loaded_the_files(tmp_path: Path, family: str) -> None:
    if family in ("qwen3_5", "qwen3_vl"):
        pytest.importorskip("torchvision", reason="vLLM imports these models with torchvision alone")
    # Only DeepSeek-V3 runs with CUDA graphs: they read the tensors that vLLM derives from its weights.
    options: dict[str, Any] = {"enforce_eager": family != "deepseek_v3"}
    if family == "qwen3_vl":
        options |= {"limit_mm_per_prompt": {"image": 0, "video": 0}, "skip_mm_profiling": True}
    if family in LINEAR and not importlib.util.find_spec("flashinfer"):  # vLLM takes it on GPUs unasked
        options |= {"additional_config": {"gdn_prefill_backend": "triton"}}
    paths, models = save(tmp_path, family)
    answers = [test_vllm.from_disk(paths[0], 1, **options)]  # alone: what it compiles, others find
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(test_vllm.from_disk, paths[1], 1, **options)
        rig = FedEngine("vllm", str(tmp_path / "served"), 1, vllm_probe.OPTIONS | options)
        found = fed(rig, family, models)
        answers.append(later.result())
    check(found, answers, [json.loads((Path(path) / "held.json").read_text()) for path in paths])


@pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="sglang is not installed")
@pytest.mark.parametrize("family", IN_SGLANG)
def test_sglang_has_what_one_has_that_loaded_the_files(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its other kernel for groups of experts is compiled on first use, for minutes.
    monkeypatch.setenv("SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK", "1")
    paths, models = save(tmp_path, family)
    answers = test_sglang.from_disk(paths, 1)
    options = sglang_probe.OPTIONS | {"custom_weight_loader": [sglang_probe.LOADER]}
    found = fed(FedEngine("sglang", paths[0], 1, options), family, models)
    check(found, answers, json.loads((Path(paths[0]) / "held.json").read_text()))
