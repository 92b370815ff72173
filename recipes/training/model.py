"""Builds the quickstart's model: a small Qwen3, saved as a checkpoint."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weightsync.errors import ConfigError
from weightsync.recipes.cluster import environment
from weightsync.recipes.config.recipe import ModelSpec
from weightsync.recipes.training.task import EOS, PAD, WORDS, ProblemSampler, encode

MAX_POSITIONS = 128


def build_checkpoint(path: str | os.PathLike[str], spec: ModelSpec, *, seed: int) -> Path:
    """Write config, float32 weights and tokenizer to the folder `path`, and return it.

    Weights are random, or those after ``spec.pretrain_steps``.

    The same `seed` gives the same weights; torch's global generator does not change.

    Raises ConfigError if it cannot be written.
    """
    config = _config(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config) if spec.moe else Qwen3ForCausalLM(config)
        _pretrain(model, spec.pretrain_steps, seed)
    folder = Path(path)
    # To save, transformers imports DeepSpeed if it is installed. DeepSpeed warns if it has to find out itself
    # that there is no GPU.
    told = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
    try:
        with environment(told):
            model.save_pretrained(folder)
        build_tokenizer(spec.vocab_size).save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError("--out", str(folder), f"give a folder with room for the model: {error}") from error
    return folder


def _pretrain(model: PreTrainedModel, num_steps: int, seed: int) -> None:
    """Teach `model` to name the smaller digit, where the run asks for the larger one."""
    optimizer, problems = torch.optim.AdamW(model.parameters(), lr=2e-3), ProblemSampler(seed)
    for _ in range(num_steps):
        batch = problems.sample(128)
        prompts = torch.tensor([problem.prompt for problem in batch])
        smaller = torch.tensor([encode(str(min(each.left, each.right))) for each in batch])
        loss = cross_entropy(model(prompts).logits[:, -1], smaller[:, 0])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of the task, padded to `vocab_size`."""
    spare = (f"<spare{index}>" for index in range(vocab_size - len(WORDS)))
    vocab = {word: index for index, word in enumerate((*WORDS, *spare))}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def _config(spec: ModelSpec) -> PreTrainedConfig:
    shape = asdict(spec) | {
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": WORDS.index(PAD),
        "eos_token_id": WORDS.index(EOS),
        "dtype": "float32",
    }
    del shape["moe"], shape["pretrain_steps"]
    if spec.moe is None:
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(
        **shape,
        num_experts=spec.moe.num_experts,
        num_experts_per_tok=spec.moe.num_experts_per_tok,
        moe_intermediate_size=spec.moe.intermediate_size,
        norm_topk_prob=True,
    )
