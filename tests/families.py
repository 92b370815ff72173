"""Tiny models of families whose files, configurations or classes differ from Llama's, with usual options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.models import redraw

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = _SHAPE | {"head_dim": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LATENT = _SHAPE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rope_parameters": _YARN,
}
_IMAGE = {
    "tie_word_embeddings": False,
    "image_token_id": 251,
    "video_token_id": 252,
    "vision_start_token_id": 253,
    "vision_end_token_id": 254,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_PATCHES = {"depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
}
_EIGHT = {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "q_lora_rank": 48}

FAMILIES: Mapping[str, Callable[[], tf.PreTrainedConfig]] = {
    "deepseek_v2": lambda: tf.DeepseekV2Config(
        **_LATENT, q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy"
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**_LATENT, **_EIGHT),
    "gemma3": lambda: tf.Gemma3Config(
        text_config=_HEADS | {"query_pre_attn_scalar": 32, "sliding_window": 16},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
        mm_tokens_per_image=1,
        image_token_index=251,
        boi_token_index=252,
        eoi_token_index=253,
    ),
    "mixtral": lambda: tf.MixtralConfig(**_HEADS, num_local_experts=4, num_experts_per_tok=2),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **_HEADS | _MAMBA, layers_block_type=["mamba", "attention", "mamba", "mlp"]
    ),
    "nemotron_h_moe": lambda: tf.NemotronHConfig(
        **_HEADS | _MAMBA,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "olmo2": lambda: tf.Olmo2Config(**_SHAPE),
    "qwen2_vl": lambda: tf.Qwen2VLConfig(
        text_config=_HEADS | {"rope_parameters": _SECTIONS},
        vision_config=_PATCHES
        | {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "patch_size": 14, "in_channels": 3},
        **_IMAGE,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config=_HEADS
        | {"rope_parameters": _SECTIONS | {"mrope_interleaved": True, "mrope_section": [8, 4, 4]}},
        vision_config=_PATCHES
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "patch_size": 16,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_IMAGE,
    ),
    "starcoder2": lambda: tf.Starcoder2Config(**_SHAPE),
}
"""A configuration of each."""


def build_family(path: Path, family: str, seed: int = 0) -> tf.PreTrainedModel:
    """Save a float32 model with random weights to `path`, as its family publishes it, and return it."""
    config = FAMILIES[family]()
    has_images = hasattr(config, "vision_config")
    auto = tf.AutoModelForImageTextToText if has_images else tf.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    redraw(model, seed)
    model.save_pretrained(path)
    return model
