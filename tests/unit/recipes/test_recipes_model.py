from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightsync.recipes.config.recipe import ModelSpec, MoeSpec
from weightsync.recipes.training.model import build_checkpoint
from weightsync.recipes.training.task import Problem

MOE = MoeSpec(num_experts=4, num_experts_per_tok=2, intermediate_size=32)


def test_the_checkpoint_is_one_that_transformers_loads(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", ModelSpec(), seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    saved = load_file(folder / "model.safetensors")
    assert set(saved) == set(model.state_dict())
    assert saved["lm_head.weight"].shape == (64, 128)


def test_the_tokenizer_speaks_the_task(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, ModelSpec(vocab_size=128), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 128
    assert tokenizer.encode("max 3 7 =") == Problem(3, 7).prompt
    assert tokenizer.decode(Problem(3, 7).answer) == "7"
    assert tokenizer.eos_token_id == AutoModelForCausalLM.from_pretrained(folder).config.eos_token_id


def test_the_seed_decides_the_weights_and_nothing_else_moves(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    one, same, other = (
        load_file(build_checkpoint(tmp_path / str(i), ModelSpec(), seed=seed) / "model.safetensors")
        for i, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("tied", [False, True])
def test_a_mixture_is_saved_expert_by_expert(tmp_path: Path, tied: bool) -> None:
    folder = build_checkpoint(tmp_path, ModelSpec(moe=MOE, tie_word_embeddings=tied), seed=0)
    saved = load_file(folder / "model.safetensors")
    assert saved["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (32, 128)
    assert ("lm_head.weight" in saved) != tied
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3_moe"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 64)
