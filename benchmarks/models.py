"""The tensors of the benchmarks' models, and the slices of engine ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightsync.plan import Box
from weightsync.recipes.forecast.catalog import load
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors

__all__ = ["Tensor", "llama_like", "model_of", "rank_box", "save_config", "shape_of"]

_TINY = ModelShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    qk_norm=True,
)
_SMALL = replace(
    _TINY,
    hidden_size=768,
    num_hidden_layers=7,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    intermediate_size=2048,
    vocab_size=32000,
    qk_norm=False,
)
_QWEN3 = replace(
    _TINY,
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    tie_word_embeddings=True,
)
_OWN = {"tiny": _TINY, "100m": _SMALL, "0.6b": _QWEN3}
_SHIPPED = {
    "1b": "llama-3.2-1b",
    "8b": "qwen3-8b",
    "moe": "qwen3-30b-a3b",
    "moe-stacked": "qwen3-30b-a3b",
    "moe4": "qwen3-30b-a3b",
}
_NUM_LAYERS = {"moe4": 4}
_CUTS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"), 0)
_CUTS |= dict.fromkeys(("o_proj", "down_proj"), 1)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One bfloat16 tensor; `cut` is the dimension that tensor parallelism cuts, if any."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def model_of(name: str, gib: float = 0, num_layers: int | None = None) -> tuple[Tensor, ...]:
    """Return a model by its name on the command line.

    ``1b`` (Llama-3.2-1B), ``8b`` (Qwen3-8B), ``llama`` (`gib` GiB of equal layers), ``moe`` and
    ``moe-stacked`` (Qwen3-30B-A3B, experts one by one or stacked), ``moe4`` (the first 4 layers, stacked),
    ``100m`` (a Llama of 197 MB), ``0.6b`` (Qwen3-0.6B), ``tiny`` (a few kilobytes, for costs that do not
    depend on bytes).
    """
    if name == "llama":
        return llama_like(gib)
    shape = shape_of(name, num_layers)
    return _stacked(_tensors(shape), shape) if name in ("moe-stacked", "moe4") else _tensors(shape)


def shape_of(name: str, num_layers: int | None = None) -> ModelShape:
    """Return the shape of a model of `model_of`, except ``llama``, which no engine serves."""
    shape = _OWN.get(name) or load(ModelShape, _SHIPPED[name], field="model", kind="models")
    return replace(shape, num_hidden_layers=num_layers or _NUM_LAYERS.get(name, shape.num_hidden_layers))


def save_config(shape: ModelShape, folder: Path) -> None:
    """Save the config of a Qwen3, with or without experts, or of a Llama if queries are not normalised."""
    from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

    config: type[PretrainedConfig] = Qwen3Config if shape.qk_norm else LlamaConfig
    more: dict[str, Any] = {}
    if shape.moe:
        config, more = Qwen3MoeConfig, {"num_experts_per_tok": 8, "norm_topk_prob": True}
        more |= {"num_experts": shape.moe.num_experts, "moe_intermediate_size": shape.moe.intermediate_size}
    config(
        architectures=[config.__name__.replace("Config", "ForCausalLM")],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        dtype=shape.dtype,
        **more,
    ).save_pretrained(folder)


def llama_like(gib: float, hidden: int = 5120) -> tuple[Tensor, ...]:
    """Return about `gib` GiB of equal layers with a fused qkv."""
    layer = (
        Tensor("qkv", (3 * hidden, hidden), 0),
        Tensor("o", (hidden, hidden), 1),
        Tensor("gate", (3 * hidden, hidden), 0),
        Tensor("up", (3 * hidden, hidden), 0),
        Tensor("down", (hidden, 3 * hidden), 1),
        Tensor("norm", (hidden,)),
    )
    num_layers = max(1, round(gib * 2**30 / sum(tensor.nbytes for tensor in layer)))
    return tuple(
        Tensor(f"model.layers.{i}.{each.name}.weight", each.shape, each.cut)
        for i in range(num_layers)
        for each in layer
    )


def _tensors(shape: ModelShape) -> tuple[Tensor, ...]:
    metas = checkpoint_tensors(shape)
    assert {meta.dtype for meta in metas} == {"bfloat16"}
    return tuple(Tensor(meta.name, meta.shape, _CUTS.get(meta.name.split(".")[-2])) for meta in metas)


def _stacked(tensors: tuple[Tensor, ...], shape: ModelShape) -> tuple[Tensor, ...]:
    """Stack the experts of each layer into two tensors, which are cut along the experts."""
    assert shape.moe is not None
    num_experts, inter, hidden = shape.moe.num_experts, shape.moe.intermediate_size, shape.hidden_size
    stacked: list[Tensor] = []
    for tensor in tensors:
        home, expert, leaf = tensor.name.partition(".experts.")
        if leaf == "0.gate_proj.weight":
            stacked.append(Tensor(f"{home}.experts.gate_up_proj", (num_experts, 2 * inter, hidden), 0))
            stacked.append(Tensor(f"{home}.experts.down_proj", (num_experts, hidden, inter), 0))
        elif not expert:
            stacked.append(tensor)
    return tuple(stacked)


def rank_box(tensor: Tensor, rank: int, num_ranks: int) -> Box:
    """Return an engine rank's part of a tensor along `cut`, or the whole."""
    offset, extent = [0] * len(tensor.shape), list(tensor.shape)
    if tensor.cut is not None:
        size = tensor.shape[tensor.cut]
        part = -(-size // num_ranks)
        start = min(rank * part, size)
        offset[tensor.cut], extent[tensor.cut] = start, min(part, size - start)
    return Box(tuple(offset), tuple(extent))
