"""An SGLang that quantised its weights to FP8 when it started: what is written in place, and what is refused.

SGLang itself is not in it: layers and methods have its names and form, and its quantiser is stated in plain
torch, as its machine code for Hopper GPUs has it. Only the reciprocal differs, which is approximate there.
`tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

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
    Online,
    W8A8Fp8LinearMethod,
    doubled,
    replaced,
)
from tests.contract.sglang_quantised import CPU, FP8, host_of, saved
from weightsync.engines.rank.rank import Rank
from weightsync.errors import ConfigError
from weightsync.plan import Layout
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.layout.coverage import covers_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {})


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


def method(**attributes: object) -> Change:
    return lambda model: vars(model.get_submodule(OUT).quant_method).update(attributes)


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
    "marlin": (method(use_marlin=True), r"o_proj: .*SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(block_quant=True), r"o_proj: it is quantised in groups \(MXFP8\)"),
    "one scale": (replaced("weight_scale", lambda scales: scales.max()), r"o_proj: it has one scale for all"),
    "no scale": (replaced("weight_scale", lambda scales: scales.half()), r"o_proj: .*scales torch\.float16"),
    "whole": (replaced("weight", lambda weight: weight.to(torch.bfloat16)), r"o_proj: it holds .*bfloat16"),
    "order": (replaced("weight", lambda weight: weight.contiguous()), r"o_proj: its rows lie between others"),
    "AMX": (
        lambda model: vars(model.get_submodule(OUT)).update(use_intel_amx_backend=True),
        r"packed for AMX",
    ),
    "cache": (
        lambda model: vars(model.get_submodule("model.layers.0.self_attn.attn")).update(k_scale_float=0.1),
        r"drawn at random",
    ),
    "derived": (lambda model: vars(model).update(post_load_weights=None), r"derives tensors"),
    "beside": (
        lambda model: vars(model.get_submodule(OUT)).update(packed=torch.zeros(8)),
        r"o_proj\.packed is no parameter",
    ),
    "other layer": (
        lambda model: setattr(model.get_submodule(IGNORED), "quant_method", AwqLinearMethod()),
        r"AwqLinearMethod may repack",
    ),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on "),
    "columns": (backwards, r"o_proj\.weight has rows that are not those of .*o_proj\.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(case: str, folder: Path) -> None:
    change, reason = REFUSED[case]
    model = Online(folder).start()
    host_of(model, folder).checkpoint()
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(ConfigError, match=rf"(?s){reason}.*vLLM") as raised:
        host_of(model, folder).checkpoint()
    assert (raised.value.field, raised.value.value) == ("options.quantization", "fp8")
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"


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
