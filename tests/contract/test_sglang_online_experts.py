"""An SGLang that quantised experts to FP8 when it started: what is written in place, and what is refused.

SGLang itself is not in it: layers and methods have its names and form, and its quantiser is stated in plain
torch, as its kernel's source has it. `tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.sglang_online import Fp8MoEMethod, FusedMoE, OnlineMoe, Quantise, whole
from tests.contract.sglang_quantised import EXPERTS, FP8, host_of, runner, saved
from weightsync.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {}, moe=True)


Change = Callable[[Any], object]


def method(**attributes: object) -> Change:
    return lambda experts: vars(experts.quant_method).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have a parameter be otherwise."""
    return lambda experts: setattr(
        experts, name, nn.Parameter(data(getattr(experts, name).data), requires_grad=False)
    )


def loads(load: Callable[[torch.Tensor, torch.Tensor, str], object]) -> Change:
    """Have a loader put the first expert elsewhere."""

    def change(experts: Any) -> None:
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


def doubled(target: torch.Tensor, tensor: torch.Tensor, shard: str) -> None:
    target[len(tensor) * (shard == "w3") :][: len(tensor)].copy_(tensor * 2)


REFUSED: dict[str, tuple[Change, str]] = {
    "TRT-LLM": (method(runner=runner("flashinfer_trtllm")), r"flashinfer_trtllm may rearrange experts"),
    "HPC": (method(runner=runner("hpc_ops")), r"hpc_ops may rearrange experts: moe_runner_backend='triton'"),
    "no runner": (method(runner=None), r"backend None may rearrange experts"),
    "marlin": (method(use_marlin=True), r"SGLANG_FORCE_FP8_MARLIN"),
    "groups": (method(block_quant=True), r"quantised in groups \(MXFP8\)"),
    "two scales": (
        replaced("w13_weight_scale", lambda scales: torch.stack([scales, scales], 1)),
        r"its w13_weight holds torch\.float8_e4m3fn .*, and scales torch\.float32 \(8, 2\)",
    ),
    "no scale": (
        lambda experts: delattr(experts, "w2_weight_scale"),
        r"its w2_weight has no w2_weight_scale",
    ),
    "whole": (
        replaced("w2_weight", lambda stack: stack.to(torch.bfloat16)),
        r"its w2_weight holds .*bfloat16",
    ),
    "order": (
        replaced("w13_weight", lambda stack: stack.transpose(1, 2).contiguous().transpose(1, 2)),
        r"experts of its w13_weight lie between others",
    ),
    "AMX": (lambda experts: vars(experts).update(use_intel_amx_backend=True), r"packed for AMX"),
    "by turns": (loads(by_turns), r"w13_weight has rows that are not those of .*\.0\.(gate|up)_proj"),
    "in halves": (loads(in_halves), r"w13_weight has one scale for parts of .*up_proj.* and .*gate_proj"),
    "computes": (loads(doubled), r"its loader runs aten\.mul\.Tensor on .*experts\.0\."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_written_in_place_is_refused_when_connecting(case: str, folder: Path) -> None:
    change, reason = REFUSED[case]
    model = OnlineMoe(folder).start()
    host_of(model, folder).checkpoint()
    change(model.get_submodule(EXPERTS))
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
def test_parts_that_ranks_do_not_keep_alike_are_refused(load: Any, reason: str, folder: Path) -> None:
    model = OnlineMoe(folder, part=(0, 2)).start()
    loads(load)(model.get_submodule(EXPERTS))
    with pytest.raises(ConfigError, match=reason):
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
def test_a_quantiser_with_other_bytes_is_refused(quantise: Quantise, folder: Path) -> None:
    model = OnlineMoe(folder, lambda: Fp8MoEMethod(quantise)).start()
    with pytest.raises(ConfigError, match=r"mlp\.experts: .*other bytes than are known, on a CPU.*vLLM"):
        host_of(model, folder).checkpoint()


def test_each_size_of_expert_is_compared_once(folder: Path) -> None:
    counts: list[Mapping[str, int]] = []

    def counted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append({"rows": len(weight)})
        return whole(weight)

    model = OnlineMoe(folder).start()
    for each in model.modules():
        if isinstance(each, FusedMoE):
            each.quant_method.quantise = counted
    host_of(model, folder).checkpoint()
    assert len(counts) == 2
