"""One small model per family, with numbers that tell every dimension from the others."""

from __future__ import annotations

from weightsync.recipes.forecast.shapes import MixtureShape, MlaShape, ModelShape

__all__ = ["DENSE", "GLM", "MLA", "MOE", "SMALL"]

DENSE = ModelShape(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=40,
    vocab_size=70,
    qk_norm=True,
    dtype="int32",
)
MOE = ModelShape(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    vocab_size=70,
    qk_norm=True,
    tie_word_embeddings=True,
    moe=MixtureShape(num_experts=6, intermediate_size=16),
    dtype="int32",
)
GLM = ModelShape(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    intermediate_size=40,
    vocab_size=70,
    attention_bias=True,
    moe=MixtureShape(
        num_experts=6, intermediate_size=16, num_shared_experts=2, first_k_dense=1, router_bias=True
    ),
    dtype="int32",
)
MLA = ModelShape(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    intermediate_size=40,
    vocab_size=70,
    mla=MlaShape(q_lora_rank=10, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=4),
    moe=MixtureShape(
        num_experts=6, intermediate_size=16, num_shared_experts=1, first_k_dense=2, router_bias=True
    ),
    dtype="int32",
)
SMALL = {"dense": DENSE, "moe": MOE, "glm": GLM, "mla": MLA}
