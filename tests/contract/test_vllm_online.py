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
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.quantising_holder import differing, load
from tests.contract.sglang_online import whole
from tests.contract.sglang_quantised import saved, trained
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
    Fp8PerTensorOnlineLinearMethod,
    Online,
    host_of,
    otherwise,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path, {})


def test_a_holder_reads_nothing_of_a_layer_of_which_a_part_comes_from_elsewhere(folder: Path) -> None:
    host = host_of(Online(folder).start(trained(folder, 0)), folder)
    metas, places = host.checkpoint().tensors, host.places()
    assert places
    export = places.export(places.formats)
    left = tuple(each for each in export.layout.segments if "layers.0.self_attn.v_proj" not in each.tensor)
    export = replace(export, layout=replace(export.layout, segments=left))
    with pytest.raises(PlanError, match=r"0\.self_attn\.qkv_proj\.weight_scale has its scale with .*q_proj"):
        export.reads(metas)


def test_a_layer_of_zeros_is_what_it_makes_of_it(folder: Path) -> None:
    model = Online(folder).start(trained(folder, 0))
    host = host_of(model, folder)
    host.checkpoint()
    for seed in (1, 2):
        tensors = trained(folder, seed)
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

    model = Online(folder, mostly).start(trained(folder, 0))
    host = host_of(model, folder)
    assert host.checkpoint().converts
    for version in (1, 2):
        num_processed = model.num_processed
        load(host.loader(stored=False), trained(folder, version))
        assert model.num_processed > num_processed
        places = host.places()
        assert places
        assert places.are_right is False
        assert differing(model, Online(folder, mostly).start(trained(folder, version))) == []
    assert "otherwise than traced: it loads each update" in caplog.text


def test_memory_that_is_short_of_the_comparison_leaves_all_to_its_loader(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Online(folder).start(trained(folder, 0))
    host = host_of(model, folder)
    host.checkpoint()

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory to quantise")

    monkeypatch.setattr("weightsync.engines.quantised.quantizing_loader.quantize_together", fail)
    for version in (1, 2):
        load(host.loader(stored=False), trained(folder, version))
        assert differing(model, Online(folder).start(trained(folder, version))) == []
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU here")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_layers_and_loaders_of_vllm_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own method, whose operator is stated in plain torch. Its loader loads each version, too."""
    num_quantised = [0]

    def quantise(weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        num_quantised[0] += 1
        return whole(weight)

    set_environment()
    build_tiny_qwen3(tmp_path)
    fp8 = importlib.import_module("vllm.model_executor.layers.quantization.online.fp8")
    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", quantise)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Kernel())
    served = Served(tmp_path, "auto", quantization="fp8_per_tensor")
    try:
        host = VllmHost(served.runner, CPU)
        check_left_to_its_loader(host, "packed for a CPU", caplog)
        for module in served.runner.get_model().modules():
            vars(module).pop("cpu_linear", None)  # of the output head, which multiplies no more
        host = VllmHost(served.runner, CPU)
        assert "of q_proj and k_proj and v_proj together" in host.checkpoint().converts
        for version in (1, 2, 3):
            tensors, before = trained(tmp_path, version), num_quantised[0]
            load(host.loader(stored=False), tensors)
            assert num_quantised[0] - before == (8 if version == 1 else 0)
            live = served.live()
            served.load(tensors)
            wanted = served.live()
            assert [name for name in wanted if not same_bits(live[name], wanted[name])] == []
            assert wanted["model.layers.0.self_attn.qkv_proj.weight"].dtype == FP8
        places = host.places()
        assert places
        assert places.are_right
    finally:
        served.close()


Change = Callable[[Any], object]


def layer(**attributes: object) -> Change:
    return lambda model: vars(model.get_submodule(QKV)).update(attributes)


def replaced(name: str, data: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Have a parameter of a layer be otherwise."""

    def change(model: Any) -> None:
        at = model.get_submodule(QKV)
        setattr(at, name, nn.Parameter(data(getattr(at, name).data), requires_grad=False))

    return change


class Int8OnlineMoEMethod: ...


class QKVParallelLinearWithLoRA(nn.Module): ...


def doubled(model: Any) -> None:
    loads = model.load_weights
    model.load_weights = lambda weights: loads((name, tensor * 2) for name, tensor in weights)


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


@pytest.mark.parametrize("case", NOT_PROVEN)
def test_what_is_not_proven_is_left_to_its_loader_and_said_in_the_log(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, reason = NOT_PROVEN[case]
    model = Online(folder).start(trained(folder, 0))
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
    model = Online(folder, otherwise).start(trained(folder, 0))
    host = host_of(model, folder)
    check_left_to_its_loader(host, "other bytes", caplog)
    for version in (1, 2):
        load(host.loader(stored=False), trained(folder, version))
        assert differing(model, Online(folder, otherwise).start(trained(folder, version))) == []


@pytest.mark.parametrize("rank", range(4))
def test_keys_that_several_ranks_keep_are_left_to_its_loader(
    rank: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts: Any = {"rank": rank, "num_ranks": 4, "copies": 2}
    model = Online(folder, **parts).start(trained(folder, 0))
    host = host_of(model, folder)
    check_left_to_its_loader(host, "qkv_proj: ranks keep unequal parts of .*q_proj.* and .*v_proj", caplog)
    load(host.loader(stored=False), trained(folder, 1))
    assert differing(model, Online(folder, **parts).start(trained(folder, 1))) == []


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
    model = Online(folder, num_ranks=2).start(trained(folder, 0))
    check_left_to_its_loader(host_of(model, folder), "its ranks agree on a scale", caplog)
    alone = Online(folder).start(trained(folder, 0))
    assert host_of(alone, folder).checkpoint().converts


@pytest.mark.parametrize("size", ["data_parallel_size", "pipeline_parallel_size"])
def test_ranks_that_calls_do_not_all_reach_or_that_have_some_layers_are_refused(
    folder: Path, size: str
) -> None:
    model = Online(folder).start(trained(folder, 0))
    with pytest.raises(ConfigError, match=f"options.{size}: 2 is not valid; leave it out"):
        host_of(model, folder, **{size: 2}).checkpoint()
