"""Tiny models of many families, with the options of the published ones that matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.models import redraw
from weightsync.engines.loading.model_folder import keep_float32

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
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
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
_EIGHT = {
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "q_lora_rank": 128,
}

_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 64}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_INTERLEAVED = _SECTIONS | {"mrope_interleaved": True, "mrope_section": [8, 4, 4]}
_OF_QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "patch_size": 16,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SMALL_EXPERTS = _SHAPE | {"intermediate_size": 32, "num_experts_per_tok": 2}
_EVERY_HEAD = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_GPT = {"vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MAMBA_1 = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "state_size": 16,
    "intermediate_size": 256,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_OF_LONGCAT = {
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "n_routed_experts",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_parameters",
}

FAMILIES: Mapping[str, Callable[[], tf.PreTrainedConfig]] = {
    "afmoe": lambda: tf.AfmoeConfig(
        **_HEADS,
        **_EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        num_dense_layers=1,
        sliding_window=16,
        score_func="sigmoid",
        route_norm=True,
        n_group=1,
        topk_group=1,
    ),
    "apertus": lambda: tf.ApertusConfig(**_SHAPE),
    "arcee": lambda: tf.ArceeConfig(**_HEADS),
    "bamba": lambda: tf.BambaConfig(**_SHAPE | _MAMBA_2, attn_layer_indices=[1]),
    "bitnet": lambda: tf.BitNetConfig(**_SHAPE),
    "bloom": lambda: tf.BloomConfig(vocab_size=256, hidden_size=128, n_layer=2, n_head=4),
    "codegen": lambda: tf.CodeGenConfig(**_GPT, rotary_dim=16),
    "cohere": lambda: tf.CohereConfig(**_SHAPE),
    "cohere2": lambda: tf.Cohere2Config(**_HEADS, sliding_window=16),
    "cohere2_moe": lambda: tf.Cohere2MoeConfig(**_HEADS, **_EXPERTS, num_experts=8),
    "cwm": lambda: tf.CwmConfig(**_HEADS, sliding_window=16),
    "deepseek_v2": lambda: tf.DeepseekV2Config(
        **_LATENT, q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy"
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**_LATENT, **_EIGHT),
    "deepseek_v32": lambda: tf.DeepseekV32Config(
        **_LATENT, **_EIGHT, index_n_heads=4, index_head_dim=128, index_topk=16
    ),
    "diffllama": lambda: tf.DiffLlamaConfig(**_SHAPE),
    "doge": lambda: tf.DogeConfig(**_SHAPE),
    "dots1": lambda: tf.Dots1Config(**_HEADS, **_EXPERTS, **_ROUTED),
    "ernie4_5": lambda: tf.Ernie4_5Config(**_HEADS),
    "ernie4_5_moe": lambda: tf.Ernie4_5_MoeConfig(
        **_SHAPE,
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "exaone4": lambda: tf.Exaone4Config(**_SHAPE, sliding_window=16, sliding_window_pattern=2),
    "exaone_moe": lambda: tf.ExaoneMoeConfig(
        **_HEADS, **_EXPERTS, num_experts=8, num_shared_experts=1, sliding_window=16
    ),
    "falcon": lambda: tf.FalconConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        max_position_embeddings=256,
    ),
    "falcon_h1": lambda: tf.FalconH1Config(**_HEADS | _MAMBA_2, mamba_d_ssm=256),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**_MAMBA_1),
    "flex_olmo": lambda: tf.FlexOlmoConfig(**_SMALL_EXPERTS, num_experts=8),
    "gemma": lambda: tf.GemmaConfig(**_HEADS),
    "gemma2": lambda: tf.Gemma2Config(
        **_HEADS | {"num_hidden_layers": 4}, query_pre_attn_scalar=32, sliding_window=16
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config=_HEADS | {"query_pre_attn_scalar": 32, "sliding_window": 16},
        vision_config=_VISION,
        mm_tokens_per_image=1,
        image_token_index=251,
        boi_token_index=252,
        eoi_token_index=253,
    ),
    "gemma3_text": lambda: tf.Gemma3TextConfig(**_HEADS, query_pre_attn_scalar=32, sliding_window=16),
    "gemma4": lambda: tf.Gemma4Config(
        text_config=_HEADS
        | {"global_head_dim": 32, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16}
    ),
    "gemma4_text": lambda: tf.Gemma4TextConfig(
        **_HEADS,
        sliding_window=16,
        global_head_dim=32,
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=16,
    ),
    "glm": lambda: tf.GlmConfig(**_HEADS),
    "glm4": lambda: tf.Glm4Config(**_HEADS),
    "glm4_moe": lambda: tf.Glm4MoeConfig(**_HEADS, **_EXPERTS, **_ROUTED, use_qk_norm=True),
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteConfig(
        **_LATENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        q_lora_rank=48,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse"],
    ),
    "glm_moe_dsa": lambda: tf.GlmMoeDsaConfig(
        **_LATENT,
        q_lora_rank=48,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=16,
        n_group=1,
        topk_group=1,
    ),
    "gpt2": lambda: tf.GPT2Config(**_GPT),
    "gpt_bigcode": lambda: tf.GPTBigCodeConfig(**_GPT),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=256,
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
        window_size=16,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_EVERY_HEAD),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_SHAPE | {"intermediate_size": 128, "head_dim": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    ),
    "gptj": lambda: tf.GPTJConfig(**_GPT, rotary_dim=16),
    "granite": lambda: tf.GraniteConfig(**_SHAPE, attention_multiplier=0.2),
    "granite_swa": lambda: tf.GraniteSWAConfig(**_HEADS, sliding_window=16),
    "granitemoe": lambda: tf.GraniteMoeConfig(**_SMALL_EXPERTS, num_local_experts=8),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **_SMALL_EXPERTS | _MAMBA_2,
        num_local_experts=8,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
    ),
    "granitemoeshared": lambda: tf.GraniteMoeSharedConfig(
        **_SMALL_EXPERTS, num_local_experts=8, shared_intermediate_size=64
    ),
    "helium": lambda: tf.HeliumConfig(**_HEADS),
    "hunyuan_v1_dense": lambda: tf.HunYuanDenseV1Config(**_HEADS),
    "hunyuan_v1_moe": lambda: tf.HunYuanMoEV1Config(**_HEADS, num_experts=4, moe_topk=2),
    "hy_v3": lambda: tf.HYV3Config(
        **_HEADS,
        **_EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        expert_hidden_dim=32,
        route_norm=True,
    ),
    "hyperclovax": lambda: tf.HyperCLOVAXConfig(**_HEADS),
    "idefics3": lambda: tf.Idefics3Config(
        text_config=tf.LlamaConfig(**_HEADS), vision_config=_VISION, image_token_id=251, scale_factor=2
    ),
    "internvl": lambda: tf.InternVLConfig(
        text_config=tf.Qwen2Config(**_SHAPE),
        vision_config=_VISION | {"image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=251,
        image_seq_length=4,
    ),
    "jais2": lambda: tf.Jais2Config(**_HEADS),
    "jamba": lambda: tf.JambaConfig(
        **_SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "jetmoe": lambda: tf.JetMoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=32,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    ),
    "kimi_k2": lambda: tf.DeepseekV3Config(
        **_LATENT | {"rope_parameters": _YARN | {"factor": 32.0, "beta_fast": 1.0}},
        **_EIGHT | {"n_group": 1},
    ),
    "kimi_linear": lambda: tf.KimiLinearConfig(
        **_LATENT | {"rope_parameters": None}, layer_types=["linear_attention", "full_attention"]
    ),
    "laguna": lambda: tf.LagunaConfig(**_HEADS, **_EXPERTS, num_experts=8),
    "lfm2": lambda: tf.Lfm2Config(
        **_SHAPE,
        block_auto_adjust_ff_dim=False,
        conv_dim=128,
        block_dim=128,
        conv_bias=False,
        layer_types=["conv", "full_attention"],
    ),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(
        **_SHAPE, **_EXPERTS, num_experts=8, num_dense_layers=1, layer_types=["conv", "full_attention"]
    ),
    "llama": lambda: tf.LlamaConfig(
        **_HEADS,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama4": lambda: tf.Llama4Config(
        text_config=_HEADS
        | {
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 128,
        },
        vision_config=_VISION
        | {
            "intermediate_size": 256,
            "patch_size": 8,
            "vision_output_dim": 128,
            "projector_input_dim": 128,
            "projector_output_dim": 128,
        },
        image_token_index=251,
    ),
    "llama4_text": lambda: tf.Llama4TextConfig(
        **_HEADS,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=128,
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=tf.LlamaConfig(**_HEADS),
        vision_config=_CLIP,
        image_token_index=251,
        vision_feature_layer=-2,
    ),
    "llava_next": lambda: tf.LlavaNextConfig(
        text_config=tf.LlamaConfig(**_HEADS),
        vision_config=_CLIP,
        image_token_index=251,
        image_grid_pinpoints=[[32, 32]],
    ),
    "llava_onevision": lambda: tf.LlavaOnevisionConfig(
        text_config=tf.Qwen2Config(**_SHAPE),
        vision_config=_SIGLIP,
        image_token_index=251,
        video_token_index=252,
        image_grid_pinpoints=[[32, 32]],
    ),
    "longcat_flash": lambda: tf.LongcatFlashConfig(
        **{key: _LATENT[key] for key in _LATENT.keys() & _OF_LONGCAT},
        num_layers=2,
        ffn_hidden_size=256,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        zero_expert_num=2,
        zero_expert_type="identity",
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        q_lora_rank=48,
    ),
    "mamba": lambda: tf.MambaConfig(**_MAMBA_1),
    "mamba2": lambda: tf.Mamba2Config(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        state_size=16,
        num_heads=8,
        head_dim=32,
        n_groups=1,
        chunk_size=16,
    ),
    "mellum": lambda: tf.MellumConfig(**_HEADS, **_EXPERTS, num_experts=8),
    "mimo_v2_flash": lambda: tf.MiMoV2FlashConfig(
        **_HEADS,
        **_EXPERTS,
        n_routed_experts=8,
        v_head_dim=32,
        swa_head_dim=32,
        swa_v_head_dim=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        hybrid_layer_pattern=[0, 1],
        layernorm_epsilon=1e-6,
        moe_layer_freq=[0, 1],
        sliding_window_size=16,
        sliding_window=16,
    ),
    "minicpm3": lambda: tf.MiniCPM3Config(
        **_SHAPE | {"num_key_value_heads": 4},
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
    ),
    "minimax": lambda: tf.MiniMaxConfig(
        **_HEADS | _SMALL_EXPERTS,
        num_local_experts=4,
        block_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "minimax_m2": lambda: tf.MiniMaxM2Config(
        **_HEADS | _SMALL_EXPERTS, num_local_experts=8, rotary_dim=16, scoring_func="sigmoid"
    ),
    "ministral": lambda: tf.MinistralConfig(**_HEADS),
    "ministral3": lambda: tf.Ministral3Config(**_HEADS),
    "mistral": lambda: tf.MistralConfig(**_HEADS, sliding_window=16),
    "mistral3": lambda: tf.Mistral3Config(
        text_config=tf.MistralConfig(**_HEADS),
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 32},
        image_token_index=251,
    ),
    "mixtral": lambda: tf.MixtralConfig(
        **_SHAPE | {"hidden_size": 256}, num_local_experts=4, num_experts_per_tok=2
    ),
    "mpt": lambda: tf.MptConfig(vocab_size=256, d_model=128, n_layers=2, n_heads=4, max_seq_len=256),
    "nanochat": lambda: tf.NanoChatConfig(**_SHAPE),
    "nemotron": lambda: tf.NemotronConfig(**_HEADS),
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
    "olmo": lambda: tf.OlmoConfig(**_SHAPE, clip_qkv=8.0),
    "olmo2": lambda: tf.Olmo2Config(**_SHAPE),
    "olmo3": lambda: tf.Olmo3Config(**_SHAPE, sliding_window=16),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**_SHAPE, **_LINEAR),
    "olmoe": lambda: tf.OlmoeConfig(**_SMALL_EXPERTS | {"num_key_value_heads": 4}, num_experts=8),
    "opt": lambda: tf.OPTConfig(
        vocab_size=256,
        hidden_size=128,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=128,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config=tf.GemmaConfig(**_HEADS),
        vision_config=_SIGLIP | {"projection_dim": 128},
        image_token_index=251,
        projection_dim=128,
    ),
    "persimmon": lambda: tf.PersimmonConfig(**_EVERY_HEAD),
    "phi": lambda: tf.PhiConfig(**_SHAPE),
    "phi3": lambda: tf.Phi3Config(**_SHAPE),
    "phimoe": lambda: tf.PhimoeConfig(**_SMALL_EXPERTS, num_local_experts=4),
    "qwen2": lambda: tf.Qwen2Config(**_SHAPE),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config=_HEADS | {"rope_parameters": _SECTIONS},
        vision_config=_PATCHES
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        **_IMAGE,
    ),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **_SHAPE, **_EXPERTS, num_experts=8, shared_expert_intermediate_size=32
    ),
    "qwen2_vl": lambda: tf.Qwen2VLConfig(
        text_config=_HEADS | {"rope_parameters": _SECTIONS},
        vision_config=_PATCHES
        | {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "patch_size": 14, "in_channels": 3},
        **_IMAGE,
    ),
    "qwen3": lambda: tf.Qwen3Config(**_HEADS, tie_word_embeddings=True),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**_HEADS, **_LINEAR),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeTextConfig(
        **_HEADS, **_LINEAR, **_EXPERTS, num_experts=8, shared_expert_intermediate_size=32
    ),
    "qwen3_5_vl": lambda: tf.Qwen3_5Config(
        text_config=_HEADS
        | _LINEAR
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 0.25,
            }
        },
        vision_config=_PATCHES | _OF_QWEN3,
        **_IMAGE,
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_HEADS, **_EXPERTS, num_experts=8),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_HEADS,
        **_LINEAR,
        **_EXPERTS,
        num_experts=8,
        shared_expert_intermediate_size=32,
        partial_rotary_factor=0.25,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config=_HEADS | {"rope_parameters": _INTERLEAVED},
        vision_config=_PATCHES | _OF_QWEN3 | {"deepstack_visual_indexes": [0]},
        **_IMAGE,
    ),
    "qwen3_vl_moe": lambda: tf.Qwen3VLMoeConfig(
        text_config=_HEADS
        | _EXPERTS
        | {"num_experts": 8, "rope_parameters": _INTERLEAVED, "norm_topk_prob": True},
        vision_config=_PATCHES | _OF_QWEN3 | {"deepstack_visual_indexes": [0]},
        **_IMAGE,
    ),
    "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(
        **_SHAPE, lru_width=128, attention_window_size=16, block_types=["recurrent", "attention"]
    ),
    "seed_oss": lambda: tf.SeedOssConfig(**_HEADS),
    "smollm3": lambda: tf.SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0]),
    "smolvlm": lambda: tf.SmolVLMConfig(
        text_config=tf.LlamaConfig(**_HEADS), vision_config=_VISION, image_token_id=251, scale_factor=2
    ),
    "solar_open": lambda: tf.SolarOpenConfig(**_HEADS, **_EXPERTS, n_routed_experts=8, n_shared_experts=1),
    "stablelm": lambda: tf.StableLmConfig(**_SHAPE),
    "starcoder2": lambda: tf.Starcoder2Config(**_SHAPE),
    "vaultgemma": lambda: tf.VaultGemmaConfig(**_HEADS, query_pre_attn_scalar=32, sliding_window=16),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=256,
        d_model=128,
        ffn_dim=256,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=256,
    ),
    "youtu": lambda: tf.YoutuConfig(**_LATENT | {"pad_token_id": None}, q_lora_rank=48),
    "zamba2": lambda: tf.Zamba2Config(
        **_SHAPE | {"num_hidden_layers": 4, "num_key_value_heads": 4},
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_d_state=16,
        mamba_headdim=32,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=8,
    ),
}
"""A configuration of each, which transformers' own classes take."""

RENAMED = (
    "deepseek_v3",
    "gemma3",
    "kimi_k2",
    "mixtral",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo2",
    "qwen2_vl",
    "qwen3_vl",
)
"""Those that test the most in a short time: their files, configurations or classes are unlike Llama's."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = {"kimi_k2": {"model_type": "kimi_k2"}}
"""Fields of published configurations that are not those of transformers' class."""


def build_family(
    path: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tf.PreTrainedModel:
    """Save a model with random weights to `path`, as its family publishes it, and return it."""
    config = FAMILIES[family]()
    has_images = hasattr(config, "vision_config")
    auto = tf.AutoModelForImageTextToText if has_images else tf.AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).eval()
    keep_float32(model, dtype)
    redraw(model, seed)
    model.save_pretrained(path)
    if family in PUBLISHED:
        stored = path / "config.json"
        stored.write_text(json.dumps(json.loads(stored.read_text()) | PUBLISHED[family]))
    return model
