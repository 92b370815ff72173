"""Weights to quantise, and comparisons of quantised bytes."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from weightsync.plan import TensorMeta
from weightsync.plan.layout.formats import FP4, MICROSCALING, NEAREST, Format, Quantization
from weightsync.recipes.forecast.quantised import INT4

__all__ = [
    "AWQ",
    "CONFIGS",
    "DTYPES",
    "GPTQ",
    "INT4",
    "by_library",
    "by_vllm",
    "check_declared",
    "dequantised",
    "dynamic",
    "fp8_blocks",
    "int4",
    "same_bits",
    "save_quantised",
    "weights",
]

AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "modules_in_block_to_quantize": [["self_attn", "mlp"]],
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALL_GROUPS = {
    ("mx", FP4): "mxfp4-pack-quantized",
    ("mx", "float8_e4m3fn"): "mxfp8-quantized",
    ("nvfp4", FP4): "nvfp4-pack-quantized",
}
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 2.0**-133, 1e-8, 448.0, -1e30, float("inf"), float("-inf"), float("nan"))


@st.composite
def weights(draw: st.DrawFn, group: int = 1) -> torch.Tensor:
    """Random normal values, some of them zeros, denormals, infinities and NaN; whole rows may be zero.

    `group`: what divides the columns.
    """
    rows, columns = draw(st.integers(1, 11)), group * draw(st.integers(1, 27))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensor = torch.randn(rows, columns, generator=seed) * 10.0 ** draw(st.integers(-9, 4))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    if draw(st.booleans()):
        tensor[draw(st.integers(0, rows - 1))] = 0
    return tensor.to(draw(st.sampled_from(DTYPES)))


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether both have the same dtype, shape and bits. NaN are alike: processors choose their sign."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    nan = found.isnan()
    bits = (each.flatten().view(torch.uint8).view(each.numel(), -1) for each in (found, wanted))
    differs = torch.ne(*bits).any(1).view(found.shape)
    return torch.equal(nan, wanted.isnan()) and not (differs & ~nan).any()


def check_declared(weight: torch.Tensor, form: Format, found: dict[str, torch.Tensor]) -> None:
    """What comes out is what the format declares."""
    meta = TensorMeta("m.weight", str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
    assert [(each.name, each.dtype, each.shape) for each in form.stored(meta)] == [
        (f"m.{name}", str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in found.items()
    ]


def by_library(weight: torch.Tensor, form: Format, strategy: str) -> dict[str, torch.Tensor]:
    """compressed-tensors' scales of the least and greatest values, and its compressed tensors."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    settings: dict[str, Any] = {"type": "float" if form.values.startswith("float") else "int"}
    settings |= {"group_size": form.block[1]} if strategy == "group" else {}
    settings |= {"block_structure": [*form.block]} if strategy == "block" else {}
    state = {"weight": weight}
    if form.rule in MICROSCALING:
        scales = torch.uint8 if form.rule == "mx" else torch.float8_e4m3fn
        settings |= {"group_size": form.block[1], "scale_dtype": scales}
    if form.rule == "nvfp4":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    args = QuantizationArgs(num_bits=form.num_bits, symmetric=form.symmetric, strategy=strategy, **settings)
    rows, columns = (size or whole for size, whole in zip(form.block, weight.shape, strict=True))
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    whole = state.get("weight_global_scale")
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, whole)
    scale, zero = (each.flatten() if strategy == "tensor" else each for each in (scale, zero))
    layout = _SMALL_GROUPS.get((form.rule, form.values))
    layout = layout or ("pack-quantized" if form.packed else "naive-quantized")
    compressor = BaseCompressor.get_value_from_registry(layout)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    with torch.compiler.set_stance("force_eager"):  # it would compile for each shape
        return dict(compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args)))


def by_vllm(weight: torch.Tensor, form: Format) -> dict[str, torch.Tensor]:
    """vLLM's values of AWQ or GPTQ, and how it packs them. GPTQ's zero points are stored less one."""
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    (rows, columns), bits = weight.shape, form.num_bits
    kinds = {4: scalar_types.uint4b8, 8: scalar_types.uint8b128}
    kind = kinds[bits] if form.symmetric else scalar_types.uint4
    group = form.block[1] or columns
    _, values, scales, zero_points = quant_utils.quantize_weights(
        weight.T.contiguous(), kind, group, zero_points=not form.symmetric
    )
    if form.rule == "awq":
        packed = (quant_utils.awq_pack(each, bits, len(each), rows) for each in (values, zero_points))
        return dict(zip(("qweight", "qzeros", "scales"), (*packed, scales), strict=True))
    zero_points = torch.full((len(scales), rows), 2 ** (bits - 1) - 1)
    return {
        "qweight": quant_utils.gptq_pack(values, bits, columns, rows),
        "qzeros": quant_utils.pack_cols(zero_points, bits, len(scales), rows),
        "scales": scales,
        "g_idx": torch.tensor([column // group for column in range(columns)], dtype=torch.int32),
    }


def dequantised(stored: dict[str, torch.Tensor], form: Format) -> torch.Tensor:
    """Return the [rows, columns] that AWQ's or GPTQ's definition makes of what a checkpoint stores."""
    values, zero_points, bits = stored["qweight"], stored["qzeros"], form.num_bits
    if form.rule == "awq":
        values, zero_points = (_unpacked(each, bits)[:, _places(each)] for each in (values, zero_points))
        groups = torch.arange(len(values)) // (form.block[1] or len(values))
    else:
        values, zero_points = _unpacked(values.T, bits).T, _unpacked(zero_points, bits) + 1
        groups = stored["g_idx"].long()
    return ((values - zero_points[groups]) * stored["scales"][groups]).T


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    return ((words.unsqueeze(2) >> torch.arange(0, 32, bits)) & (2**bits - 1)).flatten(1)


def _places(words: torch.Tensor) -> list[int]:
    """Return where AWQ has each column: the second four of eight lie between the first four."""
    return [8 * word + place for word in range(words.shape[1]) for place in (0, 4, 1, 5, 2, 6, 3, 7)]


def int4(symmetric: bool) -> dict[str, Any]:
    """Return `INT4`, or the same with zero points."""
    config: dict[str, Any] = copy.deepcopy(INT4)
    config["config_groups"]["group_0"]["weights"]["symmetric"] = symmetric
    return config


def dynamic(kind: str) -> dict[str, Any]:
    """Return a format of ``int`` or ``float`` with scales for weights' channels, and for tokens."""
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


CONFIGS = {"int4": int4(True), "zero points": int4(False), "awq": AWQ, "gptq": GPTQ}
"""A ``quantization_config`` of each format in four bits."""


def save_quantised(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Save a checkpoint's projections in bfloat16 as the format's library quantises them.

    `config` is a ``quantization_config``: `int4`, or one of another format.
    """
    quantization, stored = Quantization.read(config), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.to(torch.bfloat16)
        form = quantization.of(name) if name.endswith("_proj.weight") else None
        if form is None:
            stored[name] = weight
            continue
        base = name.removesuffix("weight")
        stored |= {base + last: part.contiguous() for last, part in _by_its_library(weight, form).items()}
    target.mkdir()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    model = json.loads((source / "config.json").read_text())
    model |= {"quantization_config": config, "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(model))


def fp8_blocks(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's rule, which vLLM has: values, and scales that are no powers of two."""
    assert not form.powers_of_two
    rows, columns = form.block
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = blocks.abs().float().amax((1, 3), keepdim=True).clamp(1e-4) / 448.0
    values = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return values[: weight.shape[0], : weight.shape[1]].contiguous(), scales[:, 0, :, 0].contiguous()


def _by_its_library(weight: torch.Tensor, form: Format) -> dict[str, torch.Tensor]:
    if form.rule == "fp8":
        if importlib.util.find_spec("vllm"):
            from vllm.utils.deep_gemm import per_block_cast_to_fp8

            values, scales = per_block_cast_to_fp8(weight, [*form.block], form.powers_of_two)
        else:
            values, scales = fp8_blocks(weight, form)
        return {"weight": values, "weight_scale_inv": scales}
    if form.rule in NEAREST:
        return by_vllm(weight, form)
    if form.block[0] > 1:
        return by_library(weight, form, "block")
    return by_library(weight, form, {(0, 0): "tensor", (1, 0): "channel"}.get(form.block, "group"))
