"""What an engine's own loader is handed in place of a trainer's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.quantised import AWQ, GPTQ, INT4, by_library, same_bits
from weightsync.engines.loading.checkpoint import Checkpoint, checkpoint_of_model
from weightsync.engines.quantised.quantizing_loader import QuantizingLoader, formats_of
from weightsync.errors import ConfigError, PlanError
from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import Format, Quantization

LAYER = "model.layers.0"


class Recorder:
    """A loader that keeps what it was handed, and counts its ends."""

    def __init__(self) -> None:
        self.came: dict[str, torch.Tensor] = {}
        self.ends: list[str] = []

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.came.update(weights)

    def finish(self) -> None:
        self.ends.append("finish")

    def abandon(self) -> None:
        self.ends.append("abandon")


def checkpoint(**sizes: int) -> Checkpoint:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=2,
        num_experts_per_tok=1,
        **{"moe_intermediate_size": 32, **sizes},
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return checkpoint_of_model(model, "m")


def test_linear_layers_and_single_experts_have_formats_and_nothing_else() -> None:
    formats = formats_of(checkpoint(), Quantization.read(INT4))
    linears = {f"self_attn.{each}_proj" for each in "qkvo"}
    experts = {f"mlp.experts.{n}.{each}_proj" for n in range(2) for each in ("gate", "up", "down")}
    assert formats.keys() == {f"{LAYER}.{each}.weight" for each in linears | experts}
    assert formats_of(checkpoint(), Quantization()) == {}


def test_a_group_that_does_not_divide_an_experts_columns_is_named_before_any_update() -> None:
    with pytest.raises(PlanError, match=r"experts\.0\.down_proj\.weight.*groups of 32 do not divide its 40"):
        formats_of(checkpoint(moe_intermediate_size=40), Quantization.read(INT4))


def test_the_loader_gets_what_the_checkpoint_stores() -> None:
    pytest.importorskip("compressed_tensors")
    name = f"{LAYER}.self_attn.q_proj.weight"
    metas = (TensorMeta(name, "bfloat16", (6, 64)), TensorMeta("norm.weight", "bfloat16", (64,)))
    formats = formats_of(Checkpoint(metas, (), frozenset({name})), Quantization.read(INT4))
    weight, norm = torch.randn(6, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
    recorder = Recorder()
    loader = QuantizingLoader(recorder, formats)
    loader.load([(name, weight), ("norm.weight", norm)])
    loader.finish()
    loader.abandon()
    assert recorder.ends == ["finish", "abandon"]
    wanted = by_library(weight, formats[name], "group")
    assert recorder.came.pop("norm.weight") is norm
    assert recorder.came.keys() == {f"{LAYER}.self_attn.q_proj.{each}" for each in wanted}
    assert all(same_bits(recorder.came[f"{LAYER}.self_attn.q_proj.{each}"], wanted[each]) for each in wanted)


def test_a_format_that_no_engine_has_been_shown_to_take_is_named() -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    with pytest.raises(ConfigError, match="no engine has been shown to take this format") as raised:
        formats_of(checkpoint(), Quantization.read(config | {"config_groups": {"group_0": group}}))
    assert raised.value.field == f"quantization_config of {LAYER}.self_attn.q_proj.weight"


@pytest.mark.parametrize("config", [AWQ, GPTQ])
def test_experts_of_awq_and_gptq_are_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no engine has been shown to take experts of it") as raised:
        formats_of(checkpoint(), Quantization.read(config))
    assert raised.value.field == f"quantization_config of {LAYER}.mlp.experts.0.gate_proj.weight"


SHARED = Format(rule="sglang_experts", values="float8_e4m3fn", block=(0, 0), together=("gate", "up"))


def sharing(*names: str) -> tuple[Recorder, QuantizingLoader]:
    recorder = Recorder()
    return recorder, QuantizingLoader(recorder, dict.fromkeys(names, SHARED))


def test_matrices_that_share_a_scale_wait_for_each_other_whatever_comes_between() -> None:
    names = [f"experts.{number}.{leaf}.weight" for number in range(2) for leaf in ("gate", "up")]
    recorder, loader = sharing(*names)
    weights = {name: torch.full((2, 2), number + 1.0) for number, name in enumerate(names)}
    loader.load([(name, weights[name]) for name in (names[1], names[2])])
    assert recorder.came == {}
    loader.load([(names[0], weights[names[0]])])
    assert recorder.came.keys() == {*names[:2], *(f"{name}_scale" for name in names[:2])}
    loader.load([(names[3], weights[names[3]])])
    loader.finish()
    scales = [recorder.came[f"{name}_scale"] * 448 for name in names]
    assert [round(float(each)) for each in scales] == [2, 2, 4, 4]
    assert [recorder.came[name].float().unique().tolist() for name in names] == [[224], [448], [320], [448]]
    assert recorder.ends == ["finish"]


def test_a_matrix_that_came_without_the_one_it_shares_a_scale_with_fails_the_update() -> None:
    names = "experts.0.gate.weight", "experts.0.up.weight"
    recorder, loader = sharing(*names)
    loader.load([(names[0], torch.ones(2, 2))])
    with pytest.raises(RuntimeError, match=r"experts\.0\.gate\.weight came twice"):
        loader.load([(names[0], torch.ones(2, 2))])
    with pytest.raises(RuntimeError, match=r"up\.weight did not come, .* with experts\.0\.gate\.weight"):
        loader.finish()
    loader.abandon()
    assert (recorder.came, recorder.ends) == ({}, ["abandon"])
