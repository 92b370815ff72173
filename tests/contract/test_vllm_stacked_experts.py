"""Slots of a real vLLM that have gate and up projections together hold what vLLM reads from PEFT's files.

vLLM has them for models whose checkpoints stack experts, such as Qwen3-VL and Qwen3.5 (these want
torchvision). A plugin has it make the same ones for a Qwen3. On a CPU no token is made with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.contract.test_vllm_expert_adapters import RANK, adapted, check_versions, peft, started
from tests.expert_adapters import STACKED, TARGETS, kinds_of_slots
from tests.models import build_tiny_qwen3
from tests.stacked_qwen3 import save_plugin
from weightsync.engines.vllm.adapter import VllmEngine
from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta
from weightsync.protocol.adapters import AdapterSpec
from weightsync.sources.lora.lora import LoraSource

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


def stack_qwen3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM give Qwen3 such slots, in its worker processes by a plugin in `folder`."""
    models = pytest.importorskip("vllm.model_executor.models.qwen3_moe")
    monkeypatch.setattr(models.Qwen3MoeForCausalLM, "is_3d_moe_weight", True)
    save_plugin(folder)
    monkeypatch.syspath_prepend(str(folder))


def assert_stacked(engine: VllmEngine) -> None:
    kinds = engine.call(lambda llm: llm.collective_rpc(kinds_of_slots))
    assert set().union(*kinds) == {"FusedMoE3DWithLoRA"}


def test_slots_hold_what_vllm_reads_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack_qwen3(tmp_path / "site", monkeypatch)
    build_tiny_qwen3(tmp_path / "base", moe=True)
    model = adapted(tmp_path / "base")
    engine = started(tmp_path / "base", monkeypatch, 1, {})
    try:
        assert_stacked(engine)
        check_versions(engine, model, tmp_path, ("stacked",))
        check_refusals(engine, LoraSource(model, "default").spec("math"))
    finally:
        engine.close()


def check_refusals(engine: VllmEngine, spec: AdapterSpec) -> None:
    """vLLM itself stops at these, passes over them, or takes rows of one expert for another's."""
    assert spec.shares_a
    last = "model.layers.1.mlp.experts.7.down_proj"
    without_last = [meta for meta in spec.tensors if not meta.name.startswith(last)]
    without_up = [meta for meta in spec.tensors if ".up_proj." not in meta.name]
    smaller = [TensorMeta(f"{last}.lora_A.weight", "float32", (2, 32))]
    smaller += [TensorMeta(f"{last}.lora_B.weight", "float32", (64, 2))]
    for tensors, shares_a, why in (
        (without_last, True, rf"target_modules: '{last}'.* adapt it, too"),
        (without_up, True, r"experts\.0\.up_proj'.* adapt it, too"),
        (without_last + smaller, True, rf"rank_pattern: 2.* give {last} rank 4"),
        (spec.tensors, False, r"enable_mixed_moe_lora_format: False .*experts\.0 have an A each"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine.open_adapter(AdapterSpec.of("part", tensors, shares_a)).layout()
    assert engine.call(lambda llm: llm.list_loras()) == set()


@pytest.mark.faults
@pytest.mark.parametrize("options", [{}, {"fully_sharded_loras": True}])
def test_slots_of_two_ranks_hold_what_vllm_reads_from_files(
    options: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_qwen3(tmp_path / "site", monkeypatch)
    build_tiny_qwen3(tmp_path / "base", moe=True)
    model = adapted(tmp_path / "base")
    engine = started(tmp_path / "base", monkeypatch, 2, options)
    try:
        assert_stacked(engine)
        check_versions(engine, model, tmp_path, ("stacked",))
    finally:
        engine.close()


@pytest.mark.faults
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("family", ["Qwen3VLMoe", "Qwen3_5Moe"])
def test_slots_of_models_with_images_hold_what_vllm_reads_from_files(
    family: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers call the language model in them otherwise than vLLM."""
    pytest.importorskip("torchvision", reason="vLLM imports these models with torchvision alone")
    model = save_tiny(family, tmp_path / "base")
    config = peft.LoraConfig(r=RANK, lora_alpha=12, target_modules=TARGETS, target_parameters=STACKED)
    engine = started(tmp_path / "base", monkeypatch, world, {"language_model_only": True})
    try:
        assert_stacked(engine)
        check_versions(engine, peft.get_peft_model(model, config), tmp_path, ("stacked",))
    finally:
        engine.close()


_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,  # vLLM asks for it
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
_TEXTS = {
    "Qwen3VLMoe": {"intermediate_size": 128, "rope_parameters": {**_ROPE, "mrope_section": [8, 4, 4]}},
    "Qwen3_5Moe": {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    },
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_OF_DEEPSTACK = {"deepstack_visual_indexes": [0]}
_TOKENS = {
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}


def save_tiny(family: str, folder: Path) -> nn.Module:
    """Save a float32 model with random weights to `folder`, and return it."""
    config = getattr(transformers, f"{family}Config")(
        text_config=_TEXT | _TEXTS[family],
        vision_config=_VISION | (_OF_DEEPSTACK if family == "Qwen3VLMoe" else {}),
        tie_word_embeddings=False,
        dtype="float32",
        **_TOKENS,
    )
    model: nn.Module = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.to(torch.float32).save_pretrained(folder)
    return model
