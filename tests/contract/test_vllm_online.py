"""A vLLM that quantises to FP8 as it loads: what is written in place, and where it goes on to do it itself.

vLLM's own layerwise loading and reload run here. Layers have its names and form, and its method is stated in
plain torch, as its kernel's source has it. `tests/gpu/test_vllm_quantised.py` has the same with its kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import differing, load
from tests.contract.sglang_online import Change, Quantise, doubled, whole
from tests.contract.sglang_quantised import saved, weights
from tests.contract.test_vllm_quantized import Served
from tests.models import build_tiny_qwen3
from tests.quantised import same_bits
from weightsync.engines.vllm.api import set_environment
from weightsync.engines.vllm.worker import VllmHost
from weightsync.errors import ConfigError, PlanError

if not importlib.util.find_spec("vllm"):
    pytest.skip("vllm is not installed", allow_module_level=True)
from tests.contract.vllm_online import (
    CPU,
    FP8,
    QKV,
    Fp8OnlineMoEMethod,
    Fp8PerTensorOnlineLinearMethod,
    Online,
    host_of,
    linears,
    otherwise,
)

EXPERTS, ROUTER = "model.layers.0.mlp.experts", "model.layers.0.mlp.gate"
STACKED = f"{EXPERTS}.routed_experts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {})


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {}, moe=True)


def test_a_holder_reads_nothing_of_a_layer_of_which_a_part_comes_from_elsewhere(folder: Path) -> None:
    host = host_of(Online(folder).start(weights(folder, 0)), folder)
    metas, places = host.checkpoint().tensors, host.places()
    assert places
    export = places.export(places.formats)
    left = tuple(each for each in export.layout.segments if "layers.0.self_attn.v_proj" not in each.tensor)
    export = replace(export, layout=replace(export.layout, segments=left))
    with pytest.raises(PlanError, match=r"0\.self_attn\.qkv_proj\.weight_scale has its scale with .*q_proj"):
        export.reads(metas)


def test_a_layer_of_zeros_is_what_it_makes_of_it(folder: Path) -> None:
    model = Online(folder).start(weights(folder, 0))
    host = host_of(model, folder)
    host.checkpoint()
    for seed in (1, 2):
        tensors = weights(folder, seed)
        for leaf in ("gate_proj", "up_proj"):
            tensors[f"model.layers.0.mlp.{leaf}.weight"].zero_()
        load(host.loader(stored=False), tensors)
        assert differing(model, Online(folder).start(tensors)) == []
    places = host.places()
    assert places
    assert places.are_right


def test_bytes_that_differ_in_the_first_update_alone_leave_all_to_its_loader(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quantiser that is right for a random matrix, and otherwise for what a trainer has."""

    def mostly(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = whole(weight)
        return (values, scale) if weight.float().std() > 1.5 else (values, scale * 2)

    model = Online(folder, mostly).start(weights(folder, 0))
    host = host_of(model, folder)
    assert host.checkpoint().converts
    for version in (1, 2):
        num_processed = model.num_processed
        load(host.loader(stored=False), weights(folder, version))
        assert model.num_processed > num_processed
        places = host.places()
        assert places
        assert places.are_right is False
        assert differing(model, Online(folder, mostly).start(weights(folder, version))) == []
    assert "otherwise than traced: it loads each update" in caplog.text


def test_experts_that_differ_in_the_first_update_alone_leave_all_to_its_loader(
    moe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quantiser that is right for random experts, and otherwise for one of a trainer."""

    def mostly(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = whole(weight)
        return (values, scale * 2) if weight.shape[0] == weight.shape[1] == 64 else (values, scale)

    model = Online(moe_folder).start(weights(moe_folder, 0))
    host = host_of(model, moe_folder)
    assert host.checkpoint().converts
    model.of_experts.quantise = mostly
    for version in (1, 2):
        num_processed = model.num_processed
        load(host.loader(stored=False), weights(moe_folder, version))
        assert model.num_processed > num_processed
        places = host.places()
        assert places
        assert places.are_right is False
    assert "gate_proj.weight_scale otherwise than traced: it loads each update" in caplog.text


def test_memory_that_is_short_of_the_comparison_leaves_all_to_its_loader(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Online(folder).start(weights(folder, 0))
    host = host_of(model, folder)
    host.checkpoint()

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory to quantise")

    monkeypatch.setattr("weightsync.engines.quantised.quantizing_loader.quantize_together", fail)
    for version in (1, 2):
        load(host.loader(stored=False), weights(folder, version))
        assert differing(model, Online(folder).start(weights(folder, version))) == []
    places = host.places()
    assert places
    assert places.are_right is False
    assert [each.getMessage() for each in caplog.records if "no memory" in each.getMessage()] == [
        "vLLM quantises in each update, see docs/quantised.md: no memory to quantise"
    ]


class Kernel:
    """Stands in for vLLM's kernels of FP8, of which it has none for CPUs."""

    def process_weights_after_loading(self, layer: nn.Module) -> None: ...

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = (layer.weight.float() * layer.weight_scale).t()
        return nn.functional.linear(x, weight.to(x.dtype), bias)


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
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_layers_and_loaders_of_vllm_itself(
    moe: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own methods, whose operator is stated in plain torch. Its loader loads each version, too."""
    num_quantised = [0]

    def quantise(weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        num_quantised[0] += 1
        return whole(weight)

    set_environment()
    build_tiny_qwen3(tmp_path, moe=moe)
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
        check_left_to_its_loader(VllmHost(served.runner, CPU), "packed for a CPU", caplog)
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
            quantised = f"{STACKED}.w13_weight" if moe else f"{QKV}.weight"
            assert wanted[quantised].dtype == FP8
        places = host.places()
        assert places
        assert places.are_right
    finally:
        served.close()


def layer(**attributes: object) -> Change:
    return lambda model: vars(model.get_submodule(QKV)).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor], path: str = QKV) -> Change:
    """Have a parameter of a layer be otherwise."""

    def change(model: Any) -> None:
        at = model.get_submodule(path)
        setattr(at, name, nn.Parameter(data(getattr(at, name).data), requires_grad=False))

    return change


class Int8OnlineMoEMethod: ...


class QKVParallelLinearWithLoRA(nn.Module): ...


NOT_PROVEN: dict[str, tuple[Change, str]] = {
    "experts": (
        lambda model: vars(model.get_submodule("model.norm")).update(quant_method=Int8OnlineMoEMethod()),
        r"model\.norm: what Int8OnlineMoEMethod makes",
    ),
    "adapters": (
        lambda model: model.add_module("wrapped", QKVParallelLinearWithLoRA()),
        r"wrapped: adapters are served",
    ),
    "quantised": (
        lambda model: vars(model.method).update(requantization_source=object()),
        r"qkv_proj: it is made of weights that are quantised already",
    ),
    "scales": (
        replaced("weight_scale", lambda scale: scale.repeat(3)),
        r"qkv_proj: it has no single float32",
    ),
    "whole": (replaced("weight", lambda weight: weight.to(torch.bfloat16)), r"qkv_proj: it holds .*bfloat16"),
    "order": (replaced("weight", lambda weight: weight.contiguous()), r"qkv_proj: its rows lie between"),
    "fails": (
        lambda model: vars(model.method).update(quantise=None),
        r"vLLM quantises no random matrix: TypeError",
    ),
    "bytes": (
        lambda model: vars(model.method).update(quantise=otherwise),
        r"vLLM quantises a random matrix like it to other bytes",
    ),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on "),
    "beside": (layer(packed=torch.zeros(8)), r"qkv_proj\.packed is no parameter"),
}


def method(**attributes: object) -> Change:
    return lambda model: vars(model.of_experts).update(attributes)


def up_first(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Put values in another order, as some kernels of experts want them."""
    values, scale = whole(weight)
    return torch.cat(values.view(torch.uint8).chunk(2)[::-1]).view(FP8), scale


def with_the_first_scale() -> Quantise:
    """Return a quantiser that has one scale for all experts of a stack, and is right for the first."""
    scales: dict[torch.Size, torch.Tensor] = {}

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = scales.setdefault(weight.shape, whole(weight)[1])
        return (weight.float() * (1 / scale)).clamp(-448, 448).to(FP8), scale

    return quantise


EXPERTS_NOT_PROVEN: dict[str, tuple[Change, str]] = {
    "bytes": (method(quantise=otherwise), r"routed_experts: vLLM quantises a random matrix .* other bytes"),
    "one scale": (
        method(quantise=with_the_first_scale()),
        r"routed_experts: vLLM quantises a random matrix .* other bytes",
    ),
    "up first": (method(quantise=up_first), r"routed_experts: vLLM quantises a random matrix .* other bytes"),
    "fails": (method(quantise=None), r"vLLM quantises no random matrix: TypeError"),
    "two scales": (
        replaced("w13_weight_scale", lambda scales: torch.stack([scales, scales], 1), STACKED),
        r"routed_experts: it has no w13_weight_scale with a float32 for each expert",
    ),
    "whole": (
        replaced("w2_weight", lambda stack: stack.to(torch.bfloat16), STACKED),
        r"routed_experts: its w2_weight holds torch\.bfloat16",
    ),
    "order": (
        replaced("w13_weight", lambda stack: stack.transpose(1, 2).contiguous().transpose(1, 2), STACKED),
        r"routed_experts: experts of its w13_weight lie between others",
    ),
    "padding": (
        lambda model: vars(model.method).update(fill=1),
        r"mlp\.gate: vLLM quantises a random matrix .* other bytes",
    ),
    "fewer": (replaced("weight", lambda weight: weight[:, :4], ROUTER), r"mlp\.gate: it holds .*\(64, 4\)"),
}


@pytest.mark.parametrize(
    ("moe", "change", "reason"),
    [
        pytest.param(moe, *each, id=f"{'experts: ' if moe else ''}{name}")
        for moe, cases in ((False, NOT_PROVEN), (True, EXPERTS_NOT_PROVEN))
        for name, each in cases.items()
    ],
)
def test_what_is_not_proven_is_left_to_its_loader_and_said_in_the_log(
    moe: bool, change: Change, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, {}, moe=moe)
    model = Online(folder).start(weights(folder, 0))
    change(model)
    held = {name: id(each) for name, each in model.named_parameters()}
    methods = {path: getattr(each, "quant_method", None) for path, each in model.named_modules()}
    check_left_to_its_loader(host_of(model, folder), reason, caplog)
    assert {name: id(each) for name, each in model.named_parameters()} == held, "a trace left its own"
    assert list(held) == [name for name, _ in model.named_parameters()]
    assert {path: getattr(each, "quant_method", None) for path, each in model.named_modules()} == methods


def check_left_to_its_loader(host: VllmHost, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weightsync.engines.vllm"):
        checkpoint = host.checkpoint()
    assert (checkpoint.converts, checkpoint.stored) == ("", ())
    assert (host.places(), host.converted()) == (None, None)
    (record,) = (each for each in caplog.records if each.name == "weightsync.engines.vllm")
    pattern = rf"vLLM quantises in each update, see docs/quantised\.md: .*{reason}"
    assert re.search(pattern, record.getMessage(), re.DOTALL), record.getMessage()


def test_another_quantiser_goes_on_in_each_update(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Online(folder, otherwise).start(weights(folder, 0))
    host = host_of(model, folder)
    check_left_to_its_loader(host, "other bytes", caplog)
    for version in (1, 2):
        load(host.loader(stored=False), weights(folder, version))
        assert differing(model, Online(folder, otherwise).start(weights(folder, version))) == []


@pytest.mark.parametrize("rank", range(4))
def test_keys_that_several_ranks_keep_are_left_to_its_loader(
    rank: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts: Any = {"rank": rank, "num_ranks": 4, "copies": 2}
    model = Online(folder, **parts).start(weights(folder, 0))
    host = host_of(model, folder)
    check_left_to_its_loader(host, "qkv_proj: ranks keep unequal parts of .*q_proj.* and .*v_proj", caplog)
    load(host.loader(stored=False), weights(folder, 1))
    assert differing(model, Online(folder, **parts).start(weights(folder, 1))) == []


def test_ranks_that_agree_on_a_scale_load_together(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As later versions of vLLM do: a rank alone must not begin to load."""
    monkeypatch.setattr(
        sys.modules[Fp8PerTensorOnlineLinearMethod.__module__],
        "amax_for_tp_weight_quant",
        None,
        raising=False,
    )
    model = Online(folder, num_ranks=2).start(weights(folder, 0))
    check_left_to_its_loader(host_of(model, folder), "its ranks agree on a scale", caplog)
    alone = Online(folder).start(weights(folder, 0))
    assert host_of(alone, folder).checkpoint().converts


@pytest.mark.parametrize("size", ["data_parallel_size", "pipeline_parallel_size"])
def test_ranks_that_calls_do_not_all_reach_or_that_have_some_layers_are_refused(
    folder: Path, size: str
) -> None:
    model = Online(folder).start(weights(folder, 0))
    with pytest.raises(ConfigError, match=f"options.{size}: 2 is not valid; leave it out"):
        host_of(model, folder, **{size: 2}).checkpoint()


def test_a_loader_that_puts_rows_elsewhere_is_left_to_itself(
    moe_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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
    model = Online(moe_folder).start(weights(moe_folder, 0))
    check_left_to_its_loader(host_of(model, moe_folder), "w13_weight has rows that are not those of", caplog)
    for version in (1, 2):
        load(host_of(model, moe_folder).loader(stored=False), weights(moe_folder, version))
        assert differing(model, Online(moe_folder).start(weights(moe_folder, version))) == []


def test_experts_that_are_quantised_and_move_between_ranks_are_refused(moe_folder: Path) -> None:
    """vLLM's loader writes experts to the slots in which vLLM starts with them."""
    model = Online(moe_folder).start(weights(moe_folder, 0))
    with pytest.raises(ConfigError, match=r"options\.enable_eplb: True .* leave it out: .* vLLM's loader"):
        host_of(model, moe_folder, enable_eplb=True).stored_otherwise()
    with pytest.raises(ConfigError, match=r"options\.enable_eplb: True .* leave it out: .* vLLM's loader"):
        host_of(model, moe_folder, enable_eplb=True).rehearse()


def test_experts_that_move_in_the_background_are_refused(moe_folder: Path) -> None:
    model = Online(moe_folder).start(weights(moe_folder, 0))
    with pytest.raises(ConfigError, match=r"options\.eplb_config\.use_async: True .* give false"):
        host_of(model, moe_folder, enable_eplb=True, eplb_config=SimpleNamespace(use_async=True)).experts()


def test_ranks_that_agree_on_the_scales_of_experts_load_together(
    moe_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As later versions of vLLM do, where ranks have parts of experts, and not where each has whole ones."""
    module = importlib.import_module(Fp8OnlineMoEMethod.__module__)
    monkeypatch.setattr(module, "amax_for_moe_weight_quant", None, raising=False)
    cut, uncut = (Online(moe_folder, num_ranks=2, whole_experts=each) for each in (False, True))
    for model in (cut, uncut):
        for layer in linears(model.start(weights(moe_folder, 0))):
            layer.tp_size = 1
    check_left_to_its_loader(host_of(cut, moe_folder), r"routed_experts: its ranks agree on a scale", caplog)
    assert host_of(uncut, moe_folder).checkpoint().converts
