"""Formats of quantised weights are read from a quantization_config, and what is not known is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.quantised import INT4
from weightsync.errors import ConfigError, PlanError
from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import FP4, Format, Quantization

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
GROUP = "config_groups.group_0"


def changed(path: str, value: object, config: dict[str, Any] = INT4) -> dict[str, Any]:
    """`config` with one value replaced."""
    found = copy.deepcopy(config)
    place = found
    *parents, last = path.split(".")
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return found


def weights(layout: str, **given: object) -> dict[str, Any]:
    return changed(f"{GROUP}.weights", given, changed("format", layout))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (INT4, Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True)),
        (
            changed(f"{GROUP}.weights.symmetric", False),
            Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True, symmetric=False),
        ),
        (
            weights("int-quantized", num_bits=8, type="int", strategy="channel"),
            Format(rule="compressed-tensors", values="int8", block=(1, 0)),
        ),
        (
            weights("float-quantized", num_bits=8, type="float", strategy="tensor"),
            Format(rule="compressed-tensors", values="float8_e4m3fn", block=(0, 0)),
        ),
        (
            weights("naive-quantized", type="float", strategy="block", block_structure=[128, 64]),
            Format(rule="compressed-tensors", values="float8_e4m3fn", block=(128, 64)),
        ),
        (FP8, Format(rule="fp8", values="float8_e4m3fn", block=(128, 128))),
        (
            FP8 | {"scale_fmt": "ue8m0"},
            Format(rule="fp8", values="float8_e4m3fn", block=(128, 128), powers_of_two=True),
        ),
        (
            weights(
                "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, scale_dtype="torch.uint8"
            ),
            Format(rule="mx", values=FP4, block=(1, 32), packed=True),
        ),
        (
            weights("mxfp8-quantized", num_bits=8, type="float", group_size=32),
            Format(rule="mx", values="float8_e4m3fn", block=(1, 32)),
        ),
        (
            weights("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16, strategy="tensor_group"),
            Format(rule="nvfp4", values=FP4, block=(1, 16), packed=True),
        ),
        (AWQ, Format(rule="awq", values="int4", block=(1, 128), packed=True, symmetric=False)),
        (GPTQ, Format(rule="gptq", values="int4", block=(1, 64), packed=True)),
        (
            GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq"},
            Format(rule="gptq", values="int8", block=(1, 0), packed=True),
        ),
    ],
)
def test_known_formats(config: dict[str, Any], wanted: Format) -> None:
    quantization = Quantization.read(config)
    assert quantization.of("model.layers.0.self_attn.q_proj.weight") == wanted
    assert quantization.of("lm_head.weight") is None


def test_targets_and_ignored_modules_are_paths_or_expressions() -> None:
    config = changed(f"{GROUP}.targets", [r"re:.*mlp\..*_proj$", "model.layers.0.self_attn.o_proj"])
    quantization = Quantization.read(changed("ignore", ["re:.*layers.1.*"], config))
    taken = {
        name: quantization.of(f"model.layers.{name}.weight") is not None
        for name in (
            "0.mlp.up_proj",
            "0.self_attn.o_proj",
            "0.self_attn.q_proj",
            "1.mlp.up_proj",
        )
    }
    assert taken == {
        "0.mlp.up_proj": True,
        "0.self_attn.o_proj": True,
        "0.self_attn.q_proj": False,
        "1.mlp.up_proj": False,
    }


@pytest.mark.parametrize(
    "config",
    [
        AWQ | {"modules_to_not_convert": ["lm_head", "layers.1.", "self_attn"]},
        GPTQ | {"modules_in_block_to_quantize": [["0.mlp.up_proj"], ["0.mlp.down_proj"]]},
        GPTQ | {"modules_in_block_to_quantize": ["0.mlp"]},
    ],
)
def test_layers_of_awq_and_gptq_are_named_by_parts_of_their_paths(config: dict[str, Any]) -> None:
    quantization = Quantization.read(config)
    names = ("layers.0.mlp.up_proj", "layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")
    taken = [name for name in names if quantization.of(f"model.{name}.weight")]
    assert taken == ["layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("config", "field", "remedy"),
    [
        ({"quant_method": "marlin"}, "quant_method", "valid: awq, compressed-tensors, fp8, gptq"),
        ({"quant_method": "fp"}, "quant_method", "did you mean 'fp8'"),
        (AWQ | {"bits": 8}, "bits", "4; valid: 4"),
        (AWQ | {"zero_point": False}, "zero_point", "true: AWQ has zero points"),
        (AWQ | {"version": "gemv"}, "version", "gemm: "),
        (AWQ | {"group_size": 100}, "group_size", "128; valid: 128, 64, 32, -1"),
        (AWQ | {"group_size": None}, "group_size", "128; valid: 128, 64, 32, -1"),
        (AWQ | {"lm_head": True}, "lm_head", "false: "),
        (GPTQ | {"bits": 3}, "bits", "4; valid: 4, 8"),
        (GPTQ | {"group_size": 16}, "group_size", "32; valid"),
        (GPTQ | {"sym": False}, "sym", "true: vLLM serves GPTQ without zero points"),
        (GPTQ | {"desc_act": True}, "desc_act", "false: an order of columns comes from data"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "checkpoint_format", "gptq: "),
        (GPTQ | {"dynamic": {"-:.*mlp": {}}}, "dynamic", "modules_in_block_to_quantize"),
        (changed("format", "nvfp4-quantized"), f"{GROUP}.format", "did you mean 'nvfp4-pack-quantized'"),
        (
            weights("mxfp8-quantized", num_bits=8, type="float", group_size=16),
            f"{GROUP}.weights.group_size",
            "32",
        ),
        (weights("mxfp4-pack-quantized", num_bits=4, type="int"), f"{GROUP}.weights.type", "float"),
        (
            weights("nvfp4-pack-quantized", num_bits=4, type="float", scale_dtype="torch.uint8"),
            f"{GROUP}.weights.scale_dtype",
            "float8_e4m3fn",
        ),
        (
            changed(f"{GROUP}.input_activations", {"num_bits": 4, "dynamic": "local"}),
            f"{GROUP}.input_activations.dynamic",
            "calibrates",
        ),
        (changed("config_groups", {}), "config_groups", "one group"),
        (changed(f"{GROUP}.targets", None), f"{GROUP}.targets", "[Linear]"),
        (changed("transform_config", {"r1": {}}), "transform_config", "leave it out"),
        (
            changed(
                f"{GROUP}.weights", {"num_bits": 8, "symmetric": False}, changed("format", "int-quantized")
            ),
            f"{GROUP}.weights.symmetric",
            "pack-quantized",
        ),
        (changed(f"{GROUP}.weights.actorder", "group"), f"{GROUP}.weights.actorder", "leave it out"),
        (changed(f"{GROUP}.weights.num_bits", 3), f"{GROUP}.weights", "holds int4 or int8"),
        (changed(f"{GROUP}.weights.group_size", None), f"{GROUP}.weights.group_size", "a size is needed"),
        (changed(f"{GROUP}.weights.strategy", "grup"), f"{GROUP}.weights.strategy", "did you mean 'group'"),
        (changed(f"{GROUP}.weights.scale_dtype", "int8"), f"{GROUP}.weights.scale_dtype", "leave it out"),
        (
            changed(f"{GROUP}.input_activations", {"num_bits": 8, "dynamic": False}),
            f"{GROUP}.input_activations.dynamic",
            "calibrates",
        ),
        (changed("weight_block_size", None, FP8), "weight_block_size", "quantization='fp8'"),
        (changed("weight_block_size", [128], FP8), "weight_block_size", "two sizes"),
        (changed("activation_scheme", "static", FP8), "activation_scheme", "calibrates"),
        (changed("scale_fmt", "ue8", FP8), "scale_fmt", "did you mean 'ue8m0'"),
    ],
)
def test_unknown_formats_are_named_with_a_remedy(config: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Quantization.read(config)
    assert raised.value.field == f"quantization_config.{field}"
    assert remedy in raised.value.remedy


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("a.weight", (8, 40), "groups of 32 do not divide its 40 columns"),
        ("a.weight", (8, 4, 32), "is none of a matrix"),
        ("a.bias", (8, 32), "is none of a matrix"),
    ],
)
def test_a_weight_that_does_not_fit_its_format_is_named(
    name: str, shape: tuple[int, ...], problem: str
) -> None:
    form = Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True)
    with pytest.raises(PlanError, match=problem) as raised:
        form.stored(TensorMeta(name, "bfloat16", shape))
    assert raised.value.parameter == name


@pytest.mark.parametrize(
    ("config", "shape", "problem"),
    [
        (AWQ, (8, 192), "groups of 128 do not divide its 192 columns; give a group_size of 64"),
        (GPTQ, (8, 40), "groups of 64 do not divide its 40 columns; give a group_size of -1"),
        (AWQ, (12, 128), "words of 8 values do not divide its shape"),
        (GPTQ, (12, 128), "words of 8 values do not divide its shape"),
        (GPTQ | {"group_size": -1}, (8, 60), "words of 8 values do not divide its shape"),
    ],
)
def test_a_weight_that_words_or_groups_do_not_divide_is_named_with_what_does(
    config: dict[str, Any], shape: tuple[int, int], problem: str
) -> None:
    form = Quantization.read(config).of("a.weight")
    assert form is not None
    with pytest.raises(PlanError, match=problem):
        form.stored(TensorMeta("a.weight", "bfloat16", shape))
