"""Tensors that transformers loads as float32 are float32 in its engine, too, and so they travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from weightsync.engines.loading.checkpoint import checkpoint_of
from weightsync.engines.loading.model_folder import ModelFolder, keep_float32
from weightsync.engines.torch.torch_module import TorchEngine

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    first_k_dense_replace=1,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_engine_has_the_dtypes_with_which_transformers_loads_the_model(tmp_path: Path, dtype: str) -> None:
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    wanted = {name: str(each.dtype) for name, each in loaded.state_dict().items()}
    assert wanted[BIAS] == "torch.float32"
    engine = TorchEngine(str(tmp_path), "e0", {"dtype": dtype})
    (layout,) = engine.layout()
    assert {meta.name: f"torch.{meta.dtype}" for meta in layout.tensors} == wanted
    described = checkpoint_of(ModelFolder(str(tmp_path)), getattr(torch, dtype))
    assert {meta.name: f"torch.{meta.dtype}" for meta in described.tensors} == wanted
    assert engine.model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_some_models_keep_parts_in_float32_for_float16_alone() -> None:
    model = torch.nn.Linear(2, 2)
    model._keep_in_fp32_modules = {"bias"}
    keep_float32(model.to(torch.bfloat16), torch.bfloat16)
    assert model.bias.dtype == torch.bfloat16
    keep_float32(model.to(torch.float16), torch.float16)
    assert (model.bias.dtype, model.weight.dtype) == (torch.float32, torch.float16)
