"""A vLLM that quantises experts to FP8 as it loads: what is written in place, and what is left to its loader.

As in `test_vllm_online`: vLLM's own layerwise loading and reload run on layers with its names and form.
`tests/gpu/test_vllm_quantised.py` has the same with its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import differing, load
from tests.contract.sglang_online import Quantise, whole
from tests.contract.sglang_quantised import saved, weights
from tests.contract.test_vllm_quantized import Served
from tests.models import build_tiny_qwen3
from tests.quantised import same_bits
from weightsync.engines.vllm.api import set_environment
from weightsync.engines.vllm.worker import VllmHost

if not importlib.util.find_spec("vllm"):
    pytest.skip("vllm is not installed", allow_module_level=True)
from tests.contract.test_vllm_online import Kernel, check_left_to_its_loader
from tests.contract.vllm_online import (
    CPU,
    FP8,
    Fp8OnlineMoEMethod,
    Online,
    host_of,
    linears,
    otherwise,
    quantised,
)

EXPERTS, ROUTER = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"
STACKED = f"{EXPERTS}.routed_experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {}, moe=True)


def test_experts_that_differ_in_the_first_update_alone_leave_all_to_its_loader(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quantiser that is right for random experts, and otherwise for one of a trainer."""

    def mostly(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = whole(weight)
        return (values, scale * 2) if weight.shape[0] == weight.shape[1] == 64 else (values, scale)

    model = Online(folder).start(weights(folder, 0))
    host = host_of(model, folder)
    assert host.checkpoint().converts
    model.of_experts.quantise = mostly
    for version in (1, 2):
        num_processed = model.num_processed
        load(host.loader(stored=False), weights(folder, version))
        assert model.num_processed > num_processed
        places = host.places()
        assert places
        assert places.are_right is False
    assert "gate_proj.weight_scale otherwise than traced: it loads each update" in caplog.text


class ExpertsKernel:
    """Stands in for vLLM's kernels of experts, which it has for GPUs alone. It adds nothing."""

    def __init__(self, config: Any) -> None:
        self.config, self.fused_experts = config, self
        self.can_overlap_shared_experts = self.is_monolithic = False

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    def output_is_reduced(self) -> bool:
        return False

    def apply(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros_like(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_experts_and_loaders_of_vllm_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own methods, whose operator is stated in plain torch. Its loader loads each version, too."""
    num_quantised = [0]

    def quantise(weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        num_quantised[0] += 1
        return whole(weight)

    set_environment()
    build_tiny_qwen3(tmp_path, moe=True)
    fp8 = importlib.import_module("vllm.model_executor.layers.quantization.online.fp8")
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.fp8")
    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", quantise)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel())
    monkeypatch.setattr(
        fp8, "select_fp8_moe_backend", lambda **_: (oracle.Fp8MoeBackend.TRITON, ExpertsKernel)
    )
    monkeypatch.setattr(
        oracle, "make_fp8_moe_kernel", lambda moe_quant_config, **_: ExpertsKernel(moe_quant_config)
    )
    served = Served(tmp_path, "auto", quantization="fp8_per_tensor")
    try:
        for module in served.runner.get_model().modules():
            vars(module).pop("cpu_linear", None)  # of the output head, which multiplies no more
        host = VllmHost(served.runner, CPU)
        converts = host.checkpoint().converts
        assert "of q_proj and k_proj and v_proj together" in converts
        assert "of gate_proj and up_proj together" in converts
        for version in (1, 2, 3):
            tensors, before = weights(tmp_path, version), num_quantised[0]
            load(host.loader(stored=False), tensors)
            assert (num_quantised[0] > before) == (version == 1)
            live = served.live()
            served.load(tensors)
            wanted = served.live()
            assert [name for name in wanted if not same_bits(live[name], wanted[name])] == []
            assert wanted[f"{STACKED}.w13_weight"].dtype == FP8
        places = host.places()
        assert places
        assert places.are_right
    finally:
        served.close()


Change = Callable[[Any], object]


def held(path: str, name: str, data: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have a parameter of a layer be otherwise."""

    def change(model: Any) -> None:
        at = model.get_submodule(path)
        setattr(at, name, nn.Parameter(data(getattr(at, name).data), requires_grad=False))

    return change


def method(**attributes: object) -> Change:
    return lambda model: vars(model.of_experts).update(attributes)


def arranged(arrange: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have the method of experts put its values in another order, as some kernels want them."""

    def otherwise_arranged(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = whole(weight)
        return arrange(values.view(torch.uint8)).view(FP8), scale

    return method(quantise=otherwise_arranged)


def up_first(values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values.chunk(2)[::-1])


def with_the_first_scale() -> Quantise:
    """Return a quantiser that has one scale for all experts of a stack, and is right for the first."""
    scales: dict[torch.Size, torch.Tensor] = {}

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scales.setdefault(weight.shape, whole(weight)[1])
        return (weight.float() * (1 / scale)).clamp(-448, 448).to(FP8), scale

    return quantise


NOT_PROVEN: dict[str, tuple[Change, str]] = {
    "bytes": (method(quantise=otherwise), r"routed_experts: vLLM quantises a random matrix .* other bytes"),
    "one scale": (
        method(quantise=with_the_first_scale()),
        r"routed_experts: vLLM quantises a random matrix .* other bytes",
    ),
    "up first": (arranged(up_first), r"routed_experts: vLLM quantises a random matrix .* other bytes"),
    "fails": (method(quantise=None), r"vLLM quantises no random matrix: TypeError"),
    "two scales": (
        held(STACKED, "w13_weight_scale", lambda scales: torch.stack([scales, scales], 1)),
        r"routed_experts: it has no w13_weight_scale with a float32 for each expert",
    ),
    "whole": (
        held(STACKED, "w2_weight", lambda stack: stack.to(torch.bfloat16)),
        r"routed_experts: its w2_weight holds torch\.bfloat16",
    ),
    "order": (
        held(STACKED, "w13_weight", lambda stack: stack.transpose(1, 2).contiguous().transpose(1, 2)),
        r"routed_experts: experts of its w13_weight lie between others",
    ),
    "padding": (
        lambda model: vars(model.method).update(fill=1),
        r"mlp\.gate: vLLM quantises a random matrix .* other bytes",
    ),
    "fewer": (held(ROUTER, "weight", lambda weight: weight[:, :4]), r"mlp\.gate: it holds .*\(64, 4\)"),
}


@pytest.mark.parametrize("case", NOT_PROVEN)
def test_what_is_not_proven_is_left_to_its_loader_and_said_in_the_log(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = NOT_PROVEN[case]
    model = Online(folder).start(weights(folder, 0))
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    methods = [each.quant_method for each in quantised(model)]
    check_left_to_its_loader(host_of(model, folder), reason, caplog)
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"
    assert [each.quant_method for each in quantised(model)] == methods


def test_a_loader_that_puts_rows_elsewhere_is_left_to_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = importlib.import_module("tests.contract.vllm_online").RoutedExperts
    loader = experts.weight_loader

    def in_turns(
        layer: Any, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: str, expert_id: int
    ) -> None:
        if shard_id == "down_proj":
            loader(layer, param, loaded_weight, shard_id, expert_id)
        else:
            param.data[expert_id][int(shard_id == "up_proj") :: 2].copy_(loaded_weight)

    monkeypatch.setattr(experts, "weight_loader", in_turns)
    model = Online(folder).start(weights(folder, 0))
    check_left_to_its_loader(host_of(model, folder), r"w13_weight has rows that are not those of ", caplog)
    for version in (1, 2):
        load(host_of(model, folder).loader(stored=False), weights(folder, version))
        assert differing(model, Online(folder).start(weights(folder, version))) == []


def test_experts_that_move_between_ranks_are_left_to_its_loader(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Online(folder).start(weights(folder, 0))
    check_left_to_its_loader(host_of(model, folder, enable_eplb=True), r"experts move between ranks", caplog)


def test_ranks_that_agree_on_the_scales_of_experts_load_together(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As later versions of vLLM do, where ranks have parts of experts, and not where each has whole ones."""
    module = importlib.import_module(Fp8OnlineMoEMethod.__module__)
    monkeypatch.setattr(module, "amax_for_moe_weight_quant", None, raising=False)
    cut, uncut = (Online(folder, num_ranks=2, whole_experts=each) for each in (False, True))
    for model in (cut, uncut):
        for layer in linears(model.start(weights(folder, 0))):
            layer.tp_size = 1
    check_left_to_its_loader(host_of(cut, folder), r"routed_experts: its ranks agree on a scale", caplog)
    assert host_of(uncut, folder).checkpoint().converts
