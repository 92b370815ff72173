"""A plan of a model that is described as Hugging Face saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from weightsync.errors import ConfigError
from weightsync.recipes import cli
from weightsync.recipes.forecast.hf_model import read_model
from weightsync.recipes.forecast.shapes import MixtureShape, MlaShape, ModelShape, checkpoint_tensors

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
COMMON = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "dtype": "bfloat16"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}

FAMILIES: dict[str, tuple[PretrainedConfig, ModelShape]] = {
    "llama": (
        LlamaConfig(**COMMON, tie_word_embeddings=True),
        ModelShape(**COMMON, tie_word_embeddings=True),
    ),
    "qwen3": (Qwen3Config(**COMMON), ModelShape(**COMMON, qk_norm=True)),
    "qwen3_moe": (
        Qwen3MoeConfig(**COMMON, **EXPERTS),
        ModelShape(
            **COMMON | {"intermediate_size": 0},
            qk_norm=True,
            moe=MixtureShape(num_experts=4, intermediate_size=24),
        ),
    ),
    "deepseek_v3": (
        DeepseekV3Config(
            **COMMON | {"num_key_value_heads": 4},
            **MLA,
            n_routed_experts=4,
            n_shared_experts=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        ModelShape(
            **{**SIZES, "intermediate_size": 64, "dtype": "bfloat16"},
            mla=MlaShape(**MLA),
            moe=MixtureShape(
                num_experts=4, intermediate_size=24, num_shared_experts=1, first_k_dense=1, router_bias=True
            ),
        ),
    ),
}


def plan(given: object, *more: str) -> Any:
    arguments = ["plan", "--model", str(given), "--trainers", "fsdp=2", "--engine", "tp=2", *more]
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("as_saved", ["folder", "config.json", "folder with files"])
def test_it_is_planned_as_the_model_is(family: str, as_saved: str, tmp_path: Path) -> None:
    config, shape = FAMILIES[family]
    folder = tmp_path / "tiny"
    if as_saved == "folder with files":
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
            folder, max_shard_size="20KB"
        )
        assert len([*folder.glob("*.safetensors")]) > 1
    else:
        config.save_pretrained(folder)
    given = folder / "config.json" if as_saved == "config.json" else folder
    name, found, tensors = read_model(str(given))
    wanted = checkpoint_tensors(shape)
    assert name == "tiny"
    assert {meta.name: meta.shape for meta in tensors} == {meta.name: meta.shape for meta in wanted}
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "moe",
        "mla",
        "tied",
    ):
        assert getattr(found, key) == getattr(shape, key), key
    result = plan(given, "--cluster", "8xh200")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"tiny: {len(wanted)} tensors of bfloat16, ")
    assert "\ndirect\n  2 engine ranks read " in result.stdout


def test_shapes_are_those_of_the_files(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["qwen3"][0]).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"vocab_size": 7, "intermediate_size": 9}))
    _, found, tensors = read_model(str(tmp_path))
    assert (found.vocab_size, found.intermediate_size) == (128, 64)
    assert {meta.name: meta.shape for meta in tensors}["model.layers.1.mlp.up_proj.weight"] == (64, 32)


def test_layers_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["qwen3"][0]).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"num_hidden_layers": 1}))
    _, found, tensors = read_model(str(tmp_path))
    assert found.num_hidden_layers == 1
    assert not any(meta.name.startswith("model.layers.1.") for meta in tensors)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "is not valid; give a folder with a config.json, as Hugging Face saves it, or this file: "),
        ("[", "give a folder with a config.json, as Hugging Face saves it, or this file: "),
        ("[" * 10**5, "give a folder with a config.json, as Hugging Face saves it, or this file: "),
        ([], "has no model_type: give a model's config.json"),
        ({"hidden_size": 8}, "has no model_type: give a model's config.json"),
        (
            {"model_type": "qwen33"},
            "transformers does not know its model_type 'qwen33'; did you mean 'qwen3'? valid: ",
        ),
        (
            {"model_type": "qwen2_5_vl", "text_config": {}, "vision_config": {}},
            "it has several models (text_config, vision_config): give a config.json with only text_config",
        ),
        (
            {"model_type": "vit"},
            "give a model that transformers builds to make text: Unrecognized configuration",
        ),
        (
            {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2},
            "the cut of transformer.wte.weight (50257, 8) in a gpt2 is not known: give a model ",
        ),
        ({"model_type": "qwen3", "hidden_size": "many"}, "give a model that transformers builds"),
    ],
)
def test_what_cannot_be_planned_is_said(config: object, says: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    result = plan(tmp_path)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"weightsync: --model: '{tmp_path}' is not valid; ")
    assert says in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_tokens.weight", (8,)),
        ("embed_tokens.weight", ()),
        ("layers.1.self_attn.v_proj.weight", (32, 0)),
        ("layers.1.mlp.up_proj.weight", (64, 32, 1)),
        ("layers.1.mlp.shared_experts.gate_proj.weight", ()),
        ("layers.0.self_attn.q_proj.bias", (4, 4)),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"][0])
    save_file(
        {each: held.clone() for each, held in model.state_dict().items()}
        | {f"model.{name}": torch.ones(shape)},
        tmp_path / "model.safetensors",
    )
    model.config.save_pretrained(tmp_path)
    result = plan(tmp_path)
    assert result.exit_code == 2, result.output
    assert f"the cut of model.{name} {shape} in a qwen3 is not known: give a model" in result.stderr


def test_a_part_of_a_checkpoint_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["qwen3"][0]).save_pretrained(tmp_path)
    kept = {"model.norm.weight": torch.ones(32)}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model\.embed_tokens\.weight is in no file: give a whole checkpoint"
    ):
        read_model(str(tmp_path))


def test_heads_that_files_do_not_tell_have_to_be_in_the_configuration(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["qwen3"][0]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"num_attention_heads: None is not valid; give a whole number"):
        read_model(str(tmp_path))
