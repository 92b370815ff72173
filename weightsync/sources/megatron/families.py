"""The checkpoint's names for families of models, by the ``model_type`` of their configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from weightsync.errors import ConfigError, nearest
from weightsync.sources.megatron.bridge import bridged_family
from weightsync.sources.megatron.cuts import Cut
from weightsync.sources.megatron.rules import Family, Rule

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_LAYER = ("decoder.layers.{layer}.", "model.layers.{layer}.")
_MTP = ("mtp.layers.{layer}.", "model.layers.{layer}.")


def find_family(family: Any) -> Family:  # noqa: ANN401 - or a bridge of another library
    """Return a family by the ``model_type`` of its checkpoints, `family` itself, or that of a bridge.

    Raises:
        ConfigError: there is none of that name, or the bridge cannot be used.
    """
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        cuts = {rule.parameter: rule.cut for each in FAMILIES.values() for rule in each.rules}
        return bridged_family(family, cuts)
    if family not in FAMILIES:
        remedy = f"or give a Family of your own, as docs/trainers.md shows; {nearest(family, FAMILIES)}"
        raise ConfigError("family", family, f"give a known model_type, {remedy}")
    return FAMILIES[family]


def _outside() -> Iterator[Rule]:
    """Yield the rules of what is in no layer."""
    yield Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", Cut.VOCABULARY)
    yield Rule("decoder.final_layernorm.weight", "model.norm.weight")
    yield Rule("output_layer.weight", "lm_head.weight", Cut.VOCABULARY)


def _norms() -> Iterator[Rule]:
    """Yield the norms before attention and MLP, as both layer specifications name them.

    Transformer Engine fuses a norm with the linear layer that follows it.
    """
    for parameter in ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"):
        yield Rule(parameter, "input_layernorm.weight")
    for parameter in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        yield Rule(parameter, "post_attention_layernorm.weight")


def _attention() -> Iterator[Rule]:
    """Yield attention with query groups, and the biases and norms that some models have."""
    for what in ("weight", "bias"):
        names = tuple(f"self_attn.{each}_proj.{what}" for each in "qkv")
        yield Rule(f"self_attention.linear_qkv.{what}", names, Cut.QKV)
    yield Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Cut.COLUMNS)
    for each in "qk":
        yield Rule(f"self_attention.{each}_layernorm.weight", f"self_attn.{each}_norm.weight")


def _latent_attention() -> Iterator[Rule]:
    """Yield multi-head latent attention. Its query may have no down-projection."""
    down_up = (("q", Cut.Q_LATENT, "q_a_proj"), ("kv", Cut.KV_LATENT, "kv_a_proj_with_mqa"))
    yield Rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", Cut.ROWS)
    for each, cut, down in down_up:
        yield Rule(f"self_attention.linear_{each}_down_proj.weight", f"self_attn.{down}.weight", cut)
        for norm in (f"{each}_layernorm.weight", f"linear_{each}_up_proj.layer_norm_weight"):
            yield Rule(f"self_attention.{norm}", f"self_attn.{each}_a_layernorm.weight")
        yield Rule(
            f"self_attention.linear_{each}_up_proj.weight", f"self_attn.{each}_b_proj.weight", Cut.ROWS
        )
    yield Rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Cut.COLUMNS)


def _mlp(
    module: str = "mlp", name: str = "mlp", leaves: tuple[str, str, str] = _GATE_UP_DOWN
) -> Iterator[Rule]:
    gate, up, down = (f"{name}.{leaf}.weight" for leaf in leaves)
    yield Rule(f"{module}.linear_fc1.weight", (gate, up), Cut.GATED)
    yield Rule(f"{module}.linear_fc2.weight", down, Cut.COLUMNS)


def _experts(name: str = "mlp", leaves: tuple[str, str, str] = _GATE_UP_DOWN) -> Iterator[Rule]:
    """Yield routed experts and their router, which files have in the module `name`.

    Experts are modules of their own, one parameter each in Transformer Engine's grouped layers, or stacked.
    """
    expert = f"{name}.experts.{{expert}}"
    gate, up, down = (f"{expert}.{leaf}.weight" for leaf in leaves)
    yield Rule("mlp.router.weight", f"{name}.gate.weight")
    yield from _mlp("mlp.experts.local_experts.{expert}", expert, leaves)
    yield Rule("mlp.experts.linear_fc1.weight{expert}", (gate, up), Cut.GATED)
    yield Rule("mlp.experts.linear_fc2.weight{expert}", down, Cut.COLUMNS)
    yield Rule("mlp.experts.weight1", (gate, up), Cut.STACKED_GATED)
    yield Rule("mlp.experts.weight2", down, Cut.STACKED_COLUMNS)


def _shared_experts() -> Iterator[Rule]:
    yield from _mlp("mlp.shared_experts", "mlp.shared_experts")


def _expert_bias() -> Rule:
    return Rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")


def _prediction() -> Iterator[Rule]:
    """Yield multi-token prediction layers, without the transformer layer in each."""
    for each in ("enorm", "hnorm"):
        yield Rule(f"{each}.weight", f"{each}.weight")
    yield Rule("eh_proj.weight", "eh_proj.weight", Cut.ROWS)
    yield Rule("final_layernorm.weight", "shared_head.norm.weight")


def _in_layer(rules: Iterable[Rule], prefixes: tuple[str, str] = _LAYER, inner: str = "") -> Iterator[Rule]:
    """Yield rules of a layer as rules of the model. `inner` is a module of Megatron's layer."""
    theirs, ours = prefixes
    for rule in rules:
        tensors = tuple(f"{ours}{name}" for name in rule.names)
        yield Rule(f"{theirs}{inner}{rule.parameter}", tensors, rule.cut)


def _family(name: str, *layer: Iterable[Rule], predicts: bool = False) -> Family:
    """Make a family of its layers' rules. If it `predicts`, it may have multi-token prediction layers."""
    rules = [rule for part in layer for rule in part]
    found = [*_outside(), *_in_layer(rules)]
    if predicts:
        found += _in_layer(_prediction(), _MTP)
        for inner in ("transformer_layer.", "mtp_model_layer."):  # its name until and after 0.16
            found += _in_layer(rules, _MTP, inner)
    return Family(name, tuple(found))


_DENSE = (*_norms(), *_attention(), *_mlp())
_DEEPSEEK = (*_norms(), *_latent_attention(), *_mlp(), *_experts(), *_shared_experts(), _expert_bias())
_GLM = (*_DENSE, *_experts(), *_shared_experts(), _expert_bias())

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": _family("deepseek_v2", _DEEPSEEK),
        "deepseek_v3": _family("deepseek_v3", _DEEPSEEK, predicts=True),
        "glm4_moe": _family("glm4_moe", _GLM, predicts=True),
        "kimi_k2": _family("kimi_k2", _DEEPSEEK, predicts=True),
        "llama": _family("llama", _DENSE),
        "mistral": _family("mistral", _DENSE),
        "mixtral": _family("mixtral", _DENSE, _experts("block_sparse_moe", ("w1", "w3", "w2"))),
        "qwen2": _family("qwen2", _DENSE),
        "qwen3": _family("qwen3", _DENSE),
        "qwen3_moe": _family("qwen3_moe", _DENSE, _experts()),
    }
)
"""Families by the ``model_type`` of their checkpoints."""
