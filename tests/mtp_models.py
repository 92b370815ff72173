"""Tiny models with multi-token prediction layers (MTP) that vLLM runs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.models import redraw

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,  # kernels for CPUs pad what is less than 32 on a rank
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 32,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # with the 64 below, all that vLLM's attention on CPUs takes
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
}


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Attributes:
        kind: transformers' type of the model.
        architecture: what vLLM takes it for.
        settings: of its configuration, beside `_SHAPE`.
        like: the layer of the model that MTP's layer is like.
        layer: what names of MTP's layer begin with.
        norms, projection: what else MTP has; the projection is of the last token's embedding and state.
    """

    kind: str
    architecture: str
    settings: Mapping[str, Any]
    like: str
    layer: str
    norms: tuple[str, ...]
    projection: str


FAMILIES = {
    "deepseek": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _EXPERTS | _LATENT,
        "model.layers.1.",
        "model.layers.2.",
        tuple(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "shared_head.norm")),
        "model.layers.2.eh_proj",
    ),
    "glm": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _EXPERTS,
        "model.layers.1.",
        "model.layers.2.",
        tuple(f"model.layers.2.{name}" for name in ("enorm", "hnorm", "shared_head.norm")),
        "model.layers.2.eh_proj",
    ),
    "mimo": Family(
        "qwen2",
        "MiMoForCausalLM",
        {},
        "model.layers.0.",
        "model.mtp_layers.0.",
        tuple(f"model.mtp_layers.0.{name}_layernorm" for name in ("token", "hidden", "final")),
        "model.mtp_layers.0.input_proj",
    ),
}
_CUT_ROWS = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
_CUT_COLUMNS = "o_proj", "down_proj"
_COPIES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}
"""What checkpoints of GLM and DeepSeek repeat in MTP's layer."""


def build_tiny_mtp(
    path: Path, family: str, seed: int = 0, mtp_seed: int = 0, **shape: int
) -> PreTrainedModel:
    """Save a float32 model and one MTP layer to `path`. Returns the model, without that layer.

    `shape` replaces parts of the model's shape.
    """
    of = FAMILIES[family]
    config = AutoConfig.for_model(of.kind, **{**_SHAPE, **of.settings, **shape})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_target(model, seed)
    model.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    settings |= {"architectures": [of.architecture], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(settings))
    weights = load_file(path / "model.safetensors")
    weights |= _mtp(weights, family, mtp_seed)
    if family != "mimo":
        weights |= {f"{of.layer}{name}": weights[theirs].clone() for theirs, name in _COPIES.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return model


def draw_target(model: PreTrainedModel, seed: int) -> None:
    """Give the model new random weights. With seed 0 its layers add nothing: the last token says the next."""
    redraw(model, seed)
    if not seed:
        _add_nothing(dict(model.named_parameters()))


def mtp_weights(path: Path, family: str, seed: int) -> dict[str, torch.Tensor]:
    """Return weights of the MTP layer for a model in `path`, by the names of a trainer.

    With seed 0 the layer predicts what a model of seed 0 says. Single experts are stacked.
    """
    weights = _mtp(load_file(path / "model.safetensors"), family, seed)
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in [name for name in weights if ".mlp.experts." in name]:
        base, _, rest = name.partition(".mlp.experts.")
        number, leaf, _ = rest.split(".")
        experts.setdefault(f"{base}.mlp.experts", {}).setdefault(int(number), {})[leaf] = weights.pop(name)
    for base, parts in experts.items():
        each = [parts[number] for number in sorted(parts)]
        gate_up = [torch.cat([part["gate_proj"], part["up_proj"]]) for part in each]
        weights[f"{base}.gate_up_proj"] = torch.stack(gate_up)
        weights[f"{base}.down_proj"] = torch.stack([part["down_proj"] for part in each])
    return weights


def part_of_rank(weights: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Return the part of an MTP layer's weights that a rank of tensor parallelism holds."""

    def part(name: str, whole: torch.Tensor) -> torch.Tensor:
        if name.endswith("experts.gate_up_proj"):  # [E, 2I, H]
            halves = whole.chunk(2, dim=1)
            return torch.cat([half.chunk(num_ranks, dim=1)[rank] for half in halves], dim=1)
        if any(each in name for each in _CUT_ROWS):
            return whole.chunk(num_ranks)[rank]
        if any(each in name for each in _CUT_COLUMNS):
            return whole.chunk(num_ranks, dim=-1)[rank]
        return whole

    return {name: part(name, whole) for name, whole in weights.items()}


def _mtp(weights: Mapping[str, torch.Tensor], family: str, seed: int) -> dict[str, torch.Tensor]:
    """Return an MTP layer of the form of the model's own layers."""
    of, hidden = FAMILIES[family], len(weights["model.norm.weight"])
    draw = torch.Generator().manual_seed(seed + 1000)
    layer = sorted(name for name in weights if name.startswith(of.like))
    shapes = {name.replace(of.like, of.layer): tuple(weights[name].shape) for name in layer}
    shapes |= {f"{name}.weight": (hidden,) for name in of.norms}
    shapes[f"{of.projection}.weight"] = (hidden, 2 * hidden)
    made = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=draw)
        made[name] = 1 + 0.1 * drawn if "norm" in name else drawn * shape[-1] ** -0.5
    if not seed:
        _add_nothing(made)
        half = torch.eye(hidden), torch.zeros(hidden, hidden)  # the last token's embedding alone
        made[f"{of.projection}.weight"] = torch.cat(half[::-1] if family == "mimo" else half, dim=1)
    return made


@torch.no_grad()
def _add_nothing(weights: Mapping[str, torch.Tensor]) -> None:
    for name, each in weights.items():
        if "norm" in name:
            each.fill_(1)
        elif "o_proj" in name or "down_proj" in name:
            each.zero_()
