"""Qwen3 models small enough to start in seconds, saved as checkpoints that every engine reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from weightsync.memory.tensors import named_tensors

__all__ = ["KINDS", "save_checkpoint", "save_qwen3"]

# 5003 is a prime: the vocabulary is padded, and no rank has a full share.
_SHAPE = {
    "vocab_size": 5003,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
KINDS = {
    "tied": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]),
    "untied": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"]),
    "moe": lambda: Qwen3MoeConfig(
        **_SHAPE, **_EXPERTS, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"]
    ),
}


def save_qwen3(path: Path, kind: str, seed: int) -> PreTrainedModel:
    """A bfloat16 model with random weights, and its checkpoint, experts one by one, in `path`."""
    config = KINDS[kind]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if "norm" in name else 0.02 if "embed" in name else 2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale + ("norm" in name))
    save_checkpoint(path, config, named_tensors(model)[0])
    return model


def save_checkpoint(path: Path, config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Save a model's tensors and `config` in `path`, experts one by one."""
    config.save_pretrained(path)
    saved = {key: value for name, t in tensors.items() for key, value in _on_disk(name, t)}
    save_file(saved, path / "model.safetensors", metadata={"format": "pt"})


def _on_disk(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    base, _, kind = name.rpartition(".experts.")
    if not base:
        yield name, tensor.detach().contiguous()
        return
    for number, expert in enumerate(tensor.detach()):
        half = expert.shape[0] // 2
        parts = {"down_proj": expert}
        if kind == "gate_up_proj":
            parts = {"gate_proj": expert[:half], "up_proj": expert[half:]}
        for part, data in parts.items():
            yield f"{base}.experts.{number}.{part}.weight", data.clone()
