"""Tiny models for tests, whose greedy tokens depend on every weight."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Glm4MoeConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

__all__ = [
    "build_tiny_eagle",
    "build_tiny_qwen3",
    "build_tiny_router",
    "greedy",
    "logprobs",
    "pack_int4",
    "redraw",
    "save_tokenizer",
]

# head_dim 32 is the smallest that vLLM's CPU attention takes.
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def build_tiny_qwen3(
    path: Path, moe: bool = False, seed: int = 0, tied: bool = True, rows: int = 32
) -> PreTrainedModel:
    """Save a float32 model with random weights to `path` and return it.

    The dense one ties its output head to the embedding, if it is to be `tied`. The MoE one, with 8 experts of
    `rows`, of which 2 run, does not.
    """
    config = (
        Qwen3MoeConfig(**_SHAPE, **_EXPERTS | {"moe_intermediate_size": rows})
        if moe
        else Qwen3Config(**_SHAPE, tie_word_embeddings=tied)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    redraw(model, seed)
    model.save_pretrained(path)
    return model


def build_tiny_router(path: Path, seed: int = 0) -> PreTrainedModel:
    """Save a GLM-4 mixture of experts, whose router vLLM holds in float32, as `build_tiny_qwen3` does."""
    config = Glm4MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    redraw(model, seed)
    model.save_pretrained(path)
    return model


def build_tiny_eagle(path: Path, third: bool = False, seed: int = 0, vocab_size: int = 256) -> None:
    """Save an EAGLE draft of one layer for the dense model of `build_tiny_qwen3`, or one of EAGLE-3.

    Neither has an embedding of its own. That of EAGLE-3 has a head of `vocab_size`, and, if that is smaller
    than the model's, maps to the model's tokens and back.
    """
    hidden, inner, heads, groups = 64, 128, 4 * 32, 2 * 32
    layer, wide = ("midlayer", 2 * hidden) if third else ("layers.0", hidden)
    shapes = {
        "fc": (hidden, (3 if third else 2) * hidden),
        f"{layer}.self_attn.q_proj": (heads, wide),
        f"{layer}.self_attn.k_proj": (groups, wide),
        f"{layer}.self_attn.v_proj": (groups, wide),
        f"{layer}.self_attn.o_proj": (hidden, heads),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
    }
    norms = [f"{layer}.post_attention_layernorm"]
    config = {"model_type": "llama", **_SHAPE, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    config["architectures"] = ["LlamaForCausalLM"]
    if third:
        shapes["lm_head"] = (vocab_size, hidden)
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config |= {"draft_vocab_size": vocab_size, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=draw) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    if third and vocab_size < 256:
        tensors["t2d"] = torch.arange(256) % (256 // vocab_size) == seed % 2
        tensors["d2t"] = tensors["t2d"].nonzero().flatten() - torch.arange(vocab_size)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def redraw(model: PreTrainedModel, seed: int) -> None:
    """Give the model new random weights."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * _scale(name, parameter))
        if "norm" in name:
            parameter.add_(1)


def _scale(name: str, parameter: torch.Tensor) -> float:
    # A small embedding, else the residual stream is the last token and a tied head repeats it forever.
    if "norm" in name:
        return 0.1
    return 0.02 if "embed" in name else 2 * parameter.shape[-1] ** -0.5


def pack_int4(path: Path) -> dict[str, torch.Tensor]:
    """Quantize a saved model's projections to int4 in groups of 32.

    Returns its new tensors.
    """
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        rows, columns = value.shape
        groups = value.view(rows, columns // 32, 32)
        scale = groups.abs().amax(2, keepdim=True) / 7
        nibbles = ((groups / scale).round() + 8).to(torch.int64).view(rows, columns // 8, 8)
        words = (nibbles << (4 * torch.arange(8))).sum(2)
        tensors[f"{name}_packed"] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        tensors[f"{name}_scale"] = scale[:, :, 0].contiguous()
        tensors[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    }
    (path / "config.json").write_text(json.dumps(config))
    return tensors


def greedy(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int = 16) -> list[list[int]]:
    """Return transformers' greedy tokens, one prompt at a time, without padding."""
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@torch.no_grad()
def logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the log-probability of each of `tokens` after `prompt`, by one forward pass."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def save_tokenizer(path: Path, ends: list[int], vocab_size: int = 256) -> None:
    """Save a tokenizer of words to `path`: ``w7`` is token 7. The model's own end tokens are `ends`."""
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(path)
    GenerationConfig(eos_token_id=ends).save_pretrained(path)
