"""Derives the tensors of a model's checkpoint from the numbers in a config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weightsync.config import Natural, Positive, at_least, check_fields
from weightsync.errors import ConfigError, nearest
from weightsync.plan import ITEMSIZE, TensorMeta
from weightsync.plan.layout.draft import DRAFT

_Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaShape:
    """Multi-head latent attention: queries, keys and values in low rank."""

    q_lora_rank: Positive
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive

    def __post_init__(self) -> None:
        check_fields(self, field="model.mla")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShape:
    """The experts, in all layers but the first `first_k_dense`.

    Attributes:
        intermediate_size: size of one expert.
        num_shared_experts: experts that take every token; they form one MLP of that many times the size.
        router_bias: the router has a float32 `e_score_correction_bias`, which is a buffer.
    """

    num_experts: Positive
    intermediate_size: Positive
    num_shared_experts: Natural = 0
    first_k_dense: Natural = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self, field="model.moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder: Qwen3, Qwen3-MoE, GLM4-MoE or DeepSeek-V3, with transformers' tensor names.

    Attributes:
        num_key_value_heads, head_dim: for grouped-query attention; unused with `mla`.
        intermediate_size: size of the dense MLPs; unused if all layers have experts.
        attention_bias: biases on the query, key and value projections.
        draft_layers: layers of a draft of the same form, which is trained with the model; 0 for none.
        published_billions: parameter count that the authors publish; 0 if unknown.
    """

    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    vocab_size: Positive
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    mla: MlaShape | None = None
    moe: MixtureShape | None = None
    dtype: str = "bfloat16"
    published_billions: float = 0.0
    draft_layers: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self, field="model")
        needed = [] if self.mla else ["num_key_value_heads", "head_dim"]
        needed += ["intermediate_size"] if self.num_dense_layers else []
        for name in needed:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), at_least(1).remedy)
        if not self.mla and self.num_attention_heads % self.num_key_value_heads:
            remedy = f"give a multiple of model.num_key_value_heads, {self.num_key_value_heads}"
            raise ConfigError("model.num_attention_heads", self.num_attention_heads, remedy)
        if self.dtype not in ITEMSIZE:
            raise ConfigError("model.dtype", self.dtype, nearest(self.dtype, ITEMSIZE))

    @property
    def num_dense_layers(self) -> int:
        """Number of layers, from the first, with a dense MLP."""
        return self.num_hidden_layers if self.moe is None else self.moe.first_k_dense

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """Tied tensors as (alias, canonical) pairs, as in `Layout`."""
        prefixes = ("", DRAFT) if self.draft_layers else ("",)
        pairs = ((f"{each}lm_head.weight", f"{each}model.embed_tokens.weight") for each in prefixes)
        return tuple(pairs) if self.tie_word_embeddings else ()

    @property
    def draft(self) -> ModelShape | None:
        """The form of the draft, None without one."""
        if not self.draft_layers:
            return None
        return replace(self, num_hidden_layers=self.draft_layers, draft_layers=0)


def checkpoint_tensors(model: ModelShape) -> tuple[TensorMeta, ...]:
    """Return every tensor of a Hugging Face checkpoint, one per expert, in layer order.

    Names and shapes are the same as in transformers' Qwen3, Qwen3Moe, Glm4Moe and DeepseekV3 models, without
    layers for multi-token prediction and without scales of quantised checkpoints. A draft comes last.
    """
    vocab = (model.vocab_size, model.hidden_size)
    dense = _layer(model, None) if model.num_dense_layers else []
    sparse = _layer(model, model.moe)
    named: list[tuple[str, _Shape]] = [("model.embed_tokens.weight", vocab)]
    for layer in range(model.num_hidden_layers):
        kind = dense if layer < model.num_dense_layers else sparse
        named += [(f"model.layers.{layer}.{name}", shape) for name, shape in kind]
    named.append(("model.norm.weight", vocab[1:]))
    named += [] if model.tie_word_embeddings else [("lm_head.weight", vocab)]
    tensors = [
        TensorMeta(name, "float32" if name.endswith("e_score_correction_bias") else model.dtype, shape)
        for name, shape in named
    ]
    of_draft = checkpoint_tensors(model.draft) if model.draft else ()
    return (*tensors, *(replace(meta, name=DRAFT + meta.name) for meta in of_draft))


def _layer(model: ModelShape, moe: MixtureShape | None) -> list[tuple[str, _Shape]]:
    hidden = model.hidden_size
    attention = _attention(model) if model.mla is None else _latent_attention(model, model.mla)
    return [
        *((f"self_attn.{name}", shape) for name, shape in attention),
        *(_mlp("mlp", hidden, model.intermediate_size) if moe is None else _mixture(moe, hidden)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    ]


def _attention(model: ModelShape) -> Iterator[tuple[str, _Shape]]:
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{name}.weight", (rows, model.hidden_size)
        if model.attention_bias:
            yield f"{name}.bias", (rows,)
    yield "o_proj.weight", (model.hidden_size, queries)
    if model.qk_norm:
        yield "q_norm.weight", (model.head_dim,)
        yield "k_norm.weight", (model.head_dim,)


def _latent_attention(model: ModelShape, mla: MlaShape) -> Iterator[tuple[str, _Shape]]:
    heads, hidden = model.num_attention_heads, model.hidden_size
    yield "q_a_proj.weight", (mla.q_lora_rank, hidden)
    yield "q_a_layernorm.weight", (mla.q_lora_rank,)
    yield "q_b_proj.weight", (heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    yield "kv_a_layernorm.weight", (mla.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield "o_proj.weight", (hidden, heads * mla.v_head_dim)


def _mixture(moe: MixtureShape, hidden: int) -> Iterator[tuple[str, _Shape]]:
    yield "mlp.gate.weight", (moe.num_experts, hidden)
    if moe.router_bias:
        yield "mlp.gate.e_score_correction_bias", (moe.num_experts,)
    for expert in range(moe.num_experts):
        yield from _mlp(f"mlp.experts.{expert}", hidden, moe.intermediate_size)
    if moe.num_shared_experts:
        yield from _mlp("mlp.shared_experts", hidden, moe.num_shared_experts * moe.intermediate_size)


def _mlp(at: str, hidden: int, inter: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{at}.gate_proj.weight", (inter, hidden)
    yield f"{at}.up_proj.weight", (inter, hidden)
    yield f"{at}.down_proj.weight", (hidden, inter)
