"""Tensor lists by formula, against transformers' own models and against what is published."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.recipes.small_models import DENSE, SMALL
from weightsync.errors import ConfigError
from weightsync.recipes.forecast.catalog import load, shipped
from weightsync.recipes.forecast.hosts import HostSpec
from weightsync.recipes.forecast.shapes import ModelShape, checkpoint_tensors

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "dense": (Qwen3Config, Qwen3ForCausalLM),
    "moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "glm": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "mla": (DeepseekV3Config, DeepseekV3ForCausalLM),
}


def transformers_config(name: str, shape: ModelShape) -> PreTrainedConfig:
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "tie_word_embeddings")
    given = {field: getattr(shape, field) for field in same} | {"pad_token_id": 0}
    if shape.intermediate_size:
        given["intermediate_size"] = shape.intermediate_size
    if shape.mla:
        given |= dataclasses.asdict(shape.mla) | {"num_key_value_heads": shape.num_attention_heads}
    else:
        heads = ("num_key_value_heads", "head_dim", "attention_bias")
        given |= {field: getattr(shape, field) for field in heads}
    if shape.moe:
        given |= {"moe_intermediate_size": shape.moe.intermediate_size, "num_experts_per_tok": 2}
        given |= {"num_experts" if name == "moe" else "n_routed_experts": shape.moe.num_experts}
    if shape.moe and name != "moe":
        given |= {"n_shared_experts": shape.moe.num_shared_experts, "n_group": 1, "topk_group": 1}
        given |= {"first_k_dense_replace": shape.moe.first_k_dense, "use_qk_norm": shape.qk_norm}
    return FAMILIES[name][0](**given)


def one_by_one(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What a checkpoint has for one of transformers' tensors, which stacks experts in its modules."""
    home, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        parts = {"gate_proj": (shape[1] // 2, shape[2]), "up_proj": (shape[1] // 2, shape[2])}
    elif leaf == "down_proj":
        parts = {"down_proj": shape[1:]}
    else:
        return {name: shape}
    return {f"{home}.{e}.{part}.weight": cut for e in range(shape[0]) for part, cut in parts.items()}


@pytest.mark.parametrize("name", SMALL)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = FAMILIES[name][1](transformers_config(name, SMALL[name]))
    expected: dict[str, tuple[int, ...]] = {}
    for tensor, value in model.state_dict().items():
        expected |= one_by_one(tensor, tuple(value.shape))
    aliases = {alias for alias, _ in SMALL[name].tied}
    ours = {meta.name: meta.shape for meta in checkpoint_tensors(SMALL[name])}
    assert len(aliases) == SMALL[name].tie_word_embeddings
    assert ours == {tensor: shape for tensor, shape in expected.items() if tensor not in aliases}


@pytest.mark.parametrize("name", shipped("models"))
def test_parameters_add_up_to_the_published_total(name: str) -> None:
    model = load(ModelShape, name, field="--model", kind="models")
    tensors = checkpoint_tensors(model)
    numel = sum(meta.numel for meta in tensors)
    assert numel == pytest.approx(model.published_billions * 1e9, rel=0.009)
    assert len({meta.name for meta in tensors}) == len(tensors)
    assert {meta.dtype for meta in tensors} <= {"bfloat16", "float32"}


@pytest.mark.parametrize("name", shipped("clusters"))
def test_clusters_load_and_say_what_was_measured(name: str) -> None:
    host = load(HostSpec, name, field="--cluster", kind="clusters")
    assert name == f"{host.gpus_per_host}x{host.gpu.split()[0].lower()}"
    assert host.hbm.gb_per_s > host.nvlink.gb_per_s > host.host.gb_per_s
    measured = {rate for rate in ("hbm", "nvlink", "host", "nic") if getattr(host, rate).source == "measured"}
    assert measured == ({"nvlink", "host"} if name == "4xh200" else set())


def test_num_hosts_counts_the_one_that_is_partly_filled() -> None:
    host = load(HostSpec, "8xh100", field="--cluster", kind="clusters")
    assert [host.num_hosts(count) for count in (1, 8, 9, 24)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 0}, "model.num_hidden_layers: 0 is not valid; give at least 1"),
        ({"head_dim": 0}, "model.head_dim: 0 is not valid; give at least 1"),
        ({"intermediate_size": 0}, "model.intermediate_size: 0 is not valid"),
        ({"num_attention_heads": 7}, "give a multiple of model.num_key_value_heads, 2"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'?"),
    ],
)
def test_a_shape_that_is_none_names_the_field(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(DENSE, **change)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_a_model_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((shipped("models")["qwen3-8b"]).read_text() + "tie_word_embeddings: true\n")
    mine = load(ModelShape, str(path), field="--model", kind="models")
    assert "lm_head.weight" not in {meta.name for meta in checkpoint_tensors(mine)}
    path.write_text("hidden_sise: 4\n")
    with pytest.raises(ConfigError, match="hidden_sise: 4 is not valid; the key is unknown; did you mean"):
        load(ModelShape, str(path), field="--model", kind="models")
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: --model: .* give YAML"):
        load(ModelShape, str(path), field="--model", kind="models")
