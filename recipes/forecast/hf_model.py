"""Reads a model as Hugging Face saves it: the configuration, and the files if there are any."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError
from weightsync.plan import TensorMeta
from weightsync.plan.layout.experts import expert_parts
from weightsync.plan.layout.segment import suggest
from weightsync.recipes.forecast.catalog import load, shipped
from weightsync.recipes.forecast.shapes import MixtureShape, MlaShape, ModelShape, checkpoint_tensors
from weightsync.sources.checkpoint.safetensors_files import contents

FIELD = "--model"
_CUT = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|model\.layers\.\d+\.(?:"
    r"self_attn\.(?:[qkv]_proj\.(?:weight|bias)|o_proj\.weight|q_[ab]_proj\.weight|kv_b_proj\.weight|kv_a_proj_with_mqa\.weight)"
    r"|mlp\.(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up|down)_proj\.weight"
    r"|mlp\.(?:gate\.(?:weight|e_score_correction_bias)|shared_expert_gate\.weight))"
)
"""Tensors with a known cut on trainers and engines. Norms are whole on each rank."""
_NORM = re.compile(r"model\.(?:layers\.\d+\.(?:self_attn\.)?)?\w*norm\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_model(given: str) -> tuple[str, ModelShape, tuple[TensorMeta, ...]]:
    """Return the name, the form and the tensors of a model.

    Args:
        given: a shipped name, a YAML file, a folder as Hugging Face saves it, or a ``config.json``. If a
            folder has safetensors files, their headers give the shapes. Else transformers builds the model,
            without memory.

    Raises:
        ConfigError: `given` is none of these; the configuration is of several models, or of a model that
            transformers does not know; or the cut of a tensor is not known.
    """
    path = Path(given)
    if given in shipped("models") or not (os.path.isdir(path) or path.suffix == ".json"):
        shape = load(ModelShape, given, field=FIELD, kind="models")
        return given, shape, checkpoint_tensors(shape)
    file = path / "config.json" if path.is_dir() else path
    config = _configuration(given, file)
    if path.is_dir() and any(path.glob("*.safetensors")):
        found = contents([given]).tensors
    else:
        config, found = _built(given, file, config["model_type"])
    tensors = tuple(_of_checkpoint(found, config.get("num_hidden_layers")))
    return file.parent.resolve().name, _form(given, config, tensors), tensors


def _configuration(given: str, file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        remedy = f"give a folder with a config.json, as Hugging Face saves it, or this file: {error}"
        raise ConfigError(FIELD, given, remedy) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(FIELD, given, f"{file} has no model_type: give a model's config.json")
    parts = [key for key in config if key.endswith("_config") and isinstance(config[key], dict)]
    if several := [key for key in parts if key != "quantization_config"]:
        one = "text_config" if "text_config" in several else several[0]
        remedy = f"it has several models ({', '.join(several)}): give a config.json with only {one}"
        raise ConfigError(FIELD, given, remedy)
    return config


def _built(given: str, file: Path, model_type: str) -> tuple[Mapping[str, Any], tuple[TensorMeta, ...]]:
    """Return the whole configuration, and the tensors of the model that transformers builds of it."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    from weightsync.memory.tensors import meta_of, named_tensors

    if model_type not in CONFIG_MAPPING:
        remedy = (
            f"transformers does not know its model_type {model_type!r}; {suggest(model_type, CONFIG_MAPPING)}"
        )
        raise ConfigError(FIELD, given, remedy)
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    except Exception as error:  # of any library that checks a configuration
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            FIELD, given, f"give a model that transformers builds to make text: {text}"
        ) from error
    tensors, _ = named_tensors(model)
    return config.to_dict(), tuple(meta_of(name, tensor) for name, tensor in tensors.items())


def _of_checkpoint(found: Sequence[TensorMeta], num_layers: object) -> Iterator[TensorMeta]:
    """Yield tensors, one for each expert, without layers after the last, which predict more tokens."""
    shapes = {meta.name: meta.shape for meta in found}
    for meta in found:
        layer = _LAYER.match(meta.name)
        if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            continue
        for name, box in expert_parts(meta.name, meta.shape, shapes):
            yield TensorMeta(name, meta.dtype, meta.shape if name == meta.name else box.extent[1:])


def _form(given: str, config: Mapping[str, Any], tensors: Sequence[TensorMeta]) -> ModelShape:
    """Return the numbers on which the cuts of trainers and engines depend. Tensors give the sizes."""
    for meta in tensors:
        is_vector = meta.name.endswith(("norm.weight", "bias"))
        is_known = _CUT.fullmatch(meta.name) or _NORM.fullmatch(meta.name)
        if not is_known or not meta.numel or len(meta.shape) != (1 if is_vector else 2):
            remedy = (
                f"the cut of {meta.name} {meta.shape} in a {config['model_type']} is not known: "
                "give a model with the layers of Llama, Qwen3, GLM4-MoE or DeepSeek-V3"
            )
            raise ConfigError(FIELD, given, remedy)
    shapes = {meta.name: meta.shape for meta in tensors}
    rows = {_LAYER.sub("", name): shape[0] for name, shape in reversed(shapes.items())}
    is_latent = "self_attn.kv_b_proj.weight" in rows
    attention = () if is_latent else ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
    for name in ("model.embed_tokens.weight", *attention):
        if name not in rows:
            raise ConfigError(
                FIELD, given, f"{name} is in no file: give a whole checkpoint, or its config.json"
            )
    vocab_size, hidden_size = shapes["model.embed_tokens.weight"]
    heads, mla = _number(given, config, "num_attention_heads"), None
    if is_latent:
        mla = MlaShape(**{key: _number(given, config, key) for key in MlaShape.__dataclass_fields__})
    head_dim = 0 if mla else rows["self_attn.q_proj.weight"] // heads
    return ModelShape(
        hidden_size=hidden_size,
        num_hidden_layers=len({layer[1] for name in shapes if (layer := _LAYER.match(name))}),
        num_attention_heads=heads,
        vocab_size=vocab_size,
        num_key_value_heads=0 if mla else rows["self_attn.k_proj.weight"] // max(head_dim, 1),
        head_dim=head_dim,
        intermediate_size=rows.get("mlp.gate_proj.weight", 0),
        tie_word_embeddings="lm_head.weight" not in shapes,
        mla=mla,
        moe=_mixture(rows, shapes),
        dtype=Counter(meta.dtype for meta in tensors).most_common(1)[0][0],
    )


def _mixture(rows: Mapping[str, int], names: Collection[str]) -> MixtureShape | None:
    experts = [name for name in rows if name.startswith("mlp.experts.") and "gate_proj" in name]
    if not experts:
        return None
    inter = rows[experts[0]]
    shared = sum(rows.get(f"mlp.{name}.gate_proj.weight", 0) for name in ("shared_expert", "shared_experts"))
    return MixtureShape(
        num_experts=len(experts),
        intermediate_size=inter,
        num_shared_experts=shared // inter,
        first_k_dense=sum(name.endswith(".mlp.gate_proj.weight") for name in names),
        router_bias="mlp.gate.e_score_correction_bias" in rows,
    )


def _number(given: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{FIELD} {given}: {key}", value, "give a whole number of at least 1 in config.json"
        )
    return value
