"""An SGLang that quantised its weights to FP8 when it started: what is written in place, and what is refused.

SGLang itself is not in it: layers and methods have its names and form, and its quantiser is stated in plain
torch, as its machine code for Hopper GPUs has it. Only the reciprocal differs, which is approximate there.
`tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.sglang_online import (
    IGNORED,
    OUT,
    Change,
    Fp8LinearMethod,
    Fp8MoEMethod,
    FusedMoE,
    Online,
    OnlineMoe,
    Quantise,
    W8A8Fp8LinearMethod,
    doubled,
    layer,
    method,
    replaced,
    whole,
)
from tests.contract.sglang_quantised import CPU, EXPERTS, FP8, host_of, runner, saved
from weightsync.engines.rank.rank import Rank
from weightsync.errors import ConfigError
from weightsync.plan import Layout
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.layout.coverage import covers_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {})


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {}, moe=True)


def test_what_it_leaves_as_it_is_stays_full_precision(folder: Path) -> None:
    host = host_of(Online(folder).start(), folder)
    stored = {meta.name: meta.dtype for meta in host.checkpoint().stored}
    assert stored[f"{OUT}.weight"] == "float8_e4m3fn"
    assert stored[f"{OUT}.weight_scale"] == "float32"
    assert stored[f"{IGNORED}.weight"] == stored["model.embed_tokens.weight"] == "bfloat16"
    assert f"{IGNORED}.weight_scale" not in stored


def test_holders_of_two_ranks_read_all_of_it_between_them(folder: Path) -> None:
    """Those of columns quantise theirs alone, as SGLang does on each rank."""
    layouts, formats = [], set()
    for rank in range(2):
        host = host_of(Online(folder, rank=rank, num_ranks=2).start(), folder)
        tensors, places = host.checkpoint().tensors, host.places()
        assert places
        formats.add(places.formats[f"{OUT}.weight"].block)
        layouts.append(reads_layout(tensors, (), places.export(places.formats).reads(tensors)))
    (block,) = formats
    whole = next(meta for meta in tensors if meta.name == f"{OUT}.weight")
    assert block == (1, whole.shape[1] // 2)
    assert covers_all(Layout.from_ranks(layouts))
    assert not covers_all(Layout.from_ranks(layouts[:1]))


def test_a_rank_declares_what_it_quantises(folder: Path) -> None:
    layout = Rank("sglang", 0, CPU, host_of(Online(folder).start(), folder)).layout().rank_layout()
    assert layout.buffers == ()
    assert "become float8_e4m3fn with a scale for 1 x all" in layout.converts


def other_rounding(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a quotient that is rounded correctly, as SGLang's kernels for other GPUs have."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scales).to(FP8), scales


def backwards(model: Any) -> None:
    """Have a loader put the columns of a matrix in another order."""
    layer = model.get_submodule(OUT)

    def load(param: Any, tensor: torch.Tensor, part: str) -> None:
        half = tensor.shape[1] // 2
        param.data[:, :half].copy_(tensor[:, half:])
        param.data[:, half:].copy_(tensor[:, :half])

    layer.weight_loader_v2 = load


class ColumnParallelLinearWithLoRA(nn.Module): ...


class AwqLinearMethod(SimpleNamespace): ...


REFUSED: dict[str, tuple[Change, str]] = {
    "marlin": (method(OUT, use_marlin=True), r"o_proj: .*SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(OUT, block_quant=True), r"o_proj: it is quantised in groups \(MXFP8\)"),
    "one scale": (replaced("weight_scale", lambda scales: scales.max()), r"o_proj: it has one scale for all"),
    "no scale": (replaced("weight_scale", lambda scales: scales.half()), r"o_proj: .*scales torch\.float16"),
    "whole": (replaced("weight", lambda weight: weight.to(torch.bfloat16)), r"o_proj: it holds .*bfloat16"),
    "order": (replaced("weight", lambda weight: weight.contiguous()), r"o_proj: its rows lie between others"),
    "AMX": (layer(OUT, use_intel_amx_backend=True), r"packed for AMX"),
    "cache": (layer("model.layers.0.self_attn.attn", k_scale_float=0.1), r"drawn at random"),
    "derived": (lambda model: vars(model).update(post_load_weights=None), r"derives tensors"),
    "beside": (layer(OUT, packed=torch.zeros(8)), r"o_proj\.packed is no parameter"),
    "other layer": (
        lambda model: setattr(model.get_submodule(IGNORED), "quant_method", AwqLinearMethod()),
        r"AwqLinearMethod may repack",
    ),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on "),
    "columns": (backwards, r"o_proj\.weight has rows that are not those of .*o_proj\.weight"),
}


def loads(load: Callable[[torch.Tensor, torch.Tensor, str], object]) -> Change:
    """Have a loader put the first expert elsewhere."""

    def change(model: Any) -> None:
        experts = model.get_submodule(EXPERTS)
        loader = experts.weight_loader

        def other(param: Any, tensor: torch.Tensor, name: str, shard_id: str, expert_id: int) -> None:
            if expert_id:
                loader(param, tensor, name, shard_id=shard_id, expert_id=expert_id)
            else:
                load(param.data[0], tensor, shard_id)

        experts.weight_loader = other

    return change


def by_turns(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    """Put rows of the gate between those of the up projection."""
    (target if shard == "w2" else target[0 if shard == "w1" else 1 :: 2]).copy_(tensor)


def in_halves(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    """Put half of the up projection before the gate, and half behind it."""
    quarter = len(tensor) // 2
    if shard == "w1":
        target[quarter : 3 * quarter].copy_(tensor)
    elif shard == "w3":
        target[:quarter].copy_(tensor[:quarter])
        target[3 * quarter :].copy_(tensor[quarter:])
    else:
        target.copy_(tensor)


def twice(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    target[len(tensor) * (shard == "w3") :][: len(tensor)].copy_(tensor * 2)


EXPERTS_REFUSED: dict[str, tuple[Change, str]] = {
    "TRT-LLM": (
        method(EXPERTS, runner=runner("flashinfer_trtllm")),
        "flashinfer_trtllm may rearrange",
    ),
    "HPC": (
        method(EXPERTS, runner=runner("hpc_ops")),
        r"hpc_ops may rearrange .*: moe_runner_backend='triton'",
    ),
    "no runner": (method(EXPERTS, runner=None), r"backend None may rearrange experts"),
    "marlin": (method(EXPERTS, use_marlin=True), r"SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(EXPERTS, block_quant=True), r"quantised in groups \(MXFP8\)"),
    "two scales": (
        replaced("w13_weight_scale", lambda scales: torch.stack([scales, scales], 1), EXPERTS),
        r"its w13_weight holds torch\.float8_e4m3fn .*, and scales torch\.float32 \(8, 2\)",
    ),
    "no scale": (
        lambda model: delattr(model.get_submodule(EXPERTS), "w2_weight_scale"),
        r"its w2_weight has no w2_weight_scale",
    ),
    "whole": (
        replaced("w2_weight", lambda stack: stack.to(torch.bfloat16), EXPERTS),
        r"its w2_weight holds .*bfloat16",
    ),
    "order": (
        replaced("w13_weight", lambda stack: stack.transpose(1, 2).contiguous().transpose(1, 2), EXPERTS),
        r"experts of its w13_weight lie between others",
    ),
    "AMX": (layer(EXPERTS, use_intel_amx_backend=True), r"packed for AMX"),
    "by turns": (loads(by_turns), r"w13_weight has rows that are not those of .*\.0\.(gate|up)_proj"),
    "in halves": (loads(in_halves), r"w13_weight has one scale for parts of .*up_proj.* and .*gate_proj"),
    "computes": (loads(twice), r"its loader runs aten\.mul\.Tensor on .*experts\.0\."),
}


@pytest.mark.parametrize(
    ("moe", "change", "reason"),
    [
        pytest.param(moe, *each, id=f"{'experts: ' if moe else ''}{name}")
        for moe, cases in ((False, REFUSED), (True, EXPERTS_REFUSED))
        for name, each in cases.items()
    ],
)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(
    moe: bool, change: Change, reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, {}, moe=moe)
    model = (OnlineMoe if moe else Online)(folder).start()
    host_of(model, folder).checkpoint()
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*vLLM") as raised:
        host_of(model, folder).checkpoint()
    assert (raised.value.field, raised.value.value) == ("options.quantization", "fp8")
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"


def parts(first: int, second: int) -> Callable[[torch.Tensor, torch.Tensor, str], object]:
    """Have a rank keep parts of a gate, and of other projections, that start at quarters of them."""

    def load(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
        axis, size = (1, target.shape[1]) if shard == "w2" else (0, len(target) // 2)
        start = (first if shard == "w1" else second) * size // 2
        part = tensor.narrow(axis, start, size)
        target[size * (shard == "w3") :][: len(part)].copy_(part)

    return load


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (parts(1, 1), r"w13_weight: ranks keep unequal parts of .*experts\.0\.gate_proj"),
        (
            parts(0, 2),
            r"w13_weight has one scale for parts of .*0\.gate_proj\.weight and .*0\.up_proj\.weight",
        ),
    ],
)
def test_parts_that_ranks_do_not_keep_alike_are_refused(load: Any, reason: str, moe_folder: Path) -> None:
    model = OnlineMoe(moe_folder, part=(0, 2)).start()
    loads(load)(model)
    with pytest.raises(ConfigError, match=reason):
        host_of(model, moe_folder).checkpoint()


def test_a_quantiser_with_other_bytes_is_refused(folder: Path) -> None:
    """As on GPUs for which SGLang's kernels are compiled otherwise."""
    model = Online(folder, lambda: Fp8LinearMethod(quantize=other_rounding)).start()
    with pytest.raises(ConfigError, match=r"other bytes than are known, on a CPU. .* Hopper .*vLLM"):
        host_of(model, folder).checkpoint()


def test_adapters_are_refused_by_their_option(folder: Path) -> None:
    model = Online(folder, W8A8Fp8LinearMethod).start()
    model.add_module("wrapped", ColumnParallelLinearWithLoRA())
    with pytest.raises(ConfigError, match=r"options\.enable_lora"):
        host_of(model, folder).checkpoint()


def a_scale_each(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise halves of an expert by themselves."""
    halves = [whole(each) for each in weight.chunk(2)]
    return torch.cat([values for values, _ in halves]), torch.maximum(*(scale for _, scale in halves))


def by_product(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With a product in place of the division, as fast math has it."""
    scale = weight.float().abs().max() * torch.tensor(1 / 448)
    return (weight.float() / scale).to(FP8), scale.reshape(1)


@pytest.mark.parametrize("quantise", [a_scale_each, by_product])
def test_a_quantiser_of_experts_with_other_bytes_is_refused(quantise: Quantise, moe_folder: Path) -> None:
    model = OnlineMoe(moe_folder, lambda: Fp8MoEMethod(quantise)).start()
    with pytest.raises(ConfigError, match=r"mlp\.experts: .*other bytes than are known, on a CPU.*vLLM"):
        host_of(model, moe_folder).checkpoint()


def test_each_size_of_expert_is_compared_once(moe_folder: Path) -> None:
    counts: list[Mapping[str, int]] = []

    def counted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append({"rows": len(weight)})
        return whole(weight)

    model = OnlineMoe(moe_folder).start()
    for each in model.modules():
        if isinstance(each, FusedMoE):
            each.quant_method.quantise = counted
    host_of(model, moe_folder).checkpoint()
    assert len(counts) == 2
