"""Tiny models for tests: seconds to start, and greedy tokens that depend on every weight."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

__all__ = ["build_tiny_qwen3", "greedy", "redraw"]

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


def build_tiny_qwen3(path: Path, moe: bool = False, seed: int = 0) -> PreTrainedModel:
    """Save a float32 model with random weights to `path` and return it.

    The dense one ties its output head to the embedding, the other, of 8 experts of which 2 run, does not.
    """
    config = Qwen3MoeConfig(**_SHAPE, **_EXPERTS) if moe else Qwen3Config(**_SHAPE, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    redraw(model, seed)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def redraw(model: PreTrainedModel, seed: int) -> None:
    """Give it other random weights."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * _scale(name, parameter))
        if "norm" in name:
            parameter.add_(1)


def _scale(name: str, parameter: torch.Tensor) -> float:
    # A small embedding, or the residual stream is the last token and a tied head repeats it for ever.
    if "norm" in name:
        return 0.1
    return 0.02 if "embed" in name else 2 * parameter.shape[-1] ** -0.5


def greedy(model: PreTrainedModel, prompts: list[list[int]], max_tokens: int = 16) -> list[list[int]]:
    """Transformers' greedy tokens, one prompt at a time, without padding."""
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
