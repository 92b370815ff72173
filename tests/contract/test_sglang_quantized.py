"""A quantised SGLang: what its layers have, where its loader puts it, and what is refused when connecting.

SGLang itself is not in it: layers and methods have its names, and its loader copies into live parameters at
once, as SGLang's does. `tests/gpu/test_sglang_quantised.py` has the same with SGLang.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.sglang_online import OUT, Change, doubled, layer, method
from tests.contract.sglang_quantised import BLOCKS, CPU, EXPERTS, Model, host_of, runner, saved, trained
from tests.quantised import AWQ, INT4, fp8_blocks, same_bits
from weightsync.engines.loading.live_digest import LiveParameters, parameters_of
from weightsync.engines.rank.rank import Rank
from weightsync.engines.sglang.draft import Speculation
from weightsync.engines.sglang.worker import RankSettings, SglangHost
from weightsync.errors import ConfigError
from weightsync.plan import Layout
from weightsync.plan.direct.stored_reads import reads_layout
from weightsync.plan.layout.coverage import covers_all
from weightsync.plan.layout.formats import Quantization


def stored(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint in FP8 blocks has in place of `tensors`."""
    quantization = Quantization.read(BLOCKS)
    for name, tensor in tensors.items():
        form = quantization.of(name) if name.endswith("_proj.weight") else None
        if form is None:
            yield name, tensor
        else:
            values, scales = fp8_blocks(tensor, form)
            yield from ((name, values), (f"{name}_scale_inv", scales))


@pytest.mark.parametrize("moe", [False, True])
def test_a_holder_can_read_just_what_its_rank_keeps(moe: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, moe=moe)
    host = host_of(Model(folder), folder)
    tensors, places = host.checkpoint().tensors, host.places()
    assert places
    reads = places.export(places.formats).reads(tensors)
    has_one = any(each.scales and 1 in each.scales.box.extent for each in reads)
    assert has_one == moe, "experts have one row of blocks, and its stride may be anything"
    assert covers_all(Layout.from_ranks([reads_layout(tensors, (), reads)]))


@pytest.mark.parametrize(("moe", "padding"), [(False, 3), (True, 3), (False, 0)])
def test_three_versions_are_what_its_loader_makes_of_the_quantised_checkpoint(
    moe: bool, padding: int, tmp_path: Path
) -> None:
    """The first goes through the loader, and two are written in place."""
    folder = saved(tmp_path, moe=moe)
    model, wanted = Model(folder, padding=padding), Model(folder, padding=padding)
    before = {name: each.clone() for name, each in model.named_parameters()}
    host, loads = host_of(model, folder), []
    load = model.load_weights
    model.load_weights = lambda weights: loads.append(1) or load(weights)  # type: ignore[method-assign]
    checkpoint = host.checkpoint()
    assert "become float8_e4m3fn with a scale for 32 x 32" in checkpoint.converts
    assert all(same_bits(each, before[name]) for name, each in model.named_parameters()), "a trace wrote"
    assert loads == [1]
    assert host.converted() is model
    for seed in (1, 2, 3):
        tensors = trained(folder, seed)
        loader = host.loader(stored=False)
        with torch.no_grad():
            loader.load(iter(tensors.items()))
            loader.finish()
            wanted.load_weights(stored(tensors))
        live = dict(parameters_of(wanted))
        assert [name for name, each in parameters_of(model) if not same_bits(each, live[name])] == []
        assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()
        assert padding == int((model.model.embed_tokens.weight == 0).all(1).sum())
    assert loads == [1, 1]


def test_what_its_checkpoint_stores_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model, wanted = Model(folder), Model(folder)
    host = host_of(model, folder)
    rank = Rank("sglang", 0, CPU, host)
    layout = rank.layout().rank_layout()
    tensors = dict(stored(trained(folder, 1)))
    assert {meta.name for meta in layout.stored} == set(tensors)
    assert layout.buffers == ()
    with torch.no_grad():
        loader = host.loader(stored=True)
        loader.load(iter(tensors.items()))
        loader.finish()
        wanted.load_weights(tensors.items())
    assert LiveParameters(model, CPU).digest() == LiveParameters(wanted, CPU).digest()


def test_a_scale_that_does_not_come_fails_the_update_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    host = host_of(Model(folder), folder)
    host.checkpoint()
    tensors = dict(stored(trained(folder, 1)))
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    loader = host.loader(stored=True)
    with torch.no_grad():
        loader.load(iter(tensors.items()))
    with pytest.raises(RuntimeError, match=r"down_proj\.weight_scale_inv did not come"):
        loader.finish()


REFUSED: dict[str, tuple[Change, str]] = {
    "marlin": (method(OUT, use_marlin=True), r"SGLANG_FORCE_FP8_MARLIN"),
    "one scale": (method(OUT, block_quant=False), r"another format than FP8 in blocks"),
    "groups": (method(OUT, use_mxfp8=True), r"another format than FP8 in blocks"),
    "FP4": (method(EXPERTS, is_fp4_expert=True), r"another format than FP8 in blocks"),
    "again": (layer(f"{OUT}.weight_scale_inv", format_ue8m0=True), r"fp8_gemm_runner_backend='triton'"),
    "runner": (method(EXPERTS, runner=runner("hpc_ops")), r"hpc_ops may rearrange.*moe_runner_backend"),
    "no runner": (method(EXPERTS, runner=None), r"None may rearrange experts"),
    "AMX": (layer(OUT, use_intel_amx_backend=True), r"packed for AMX"),
    "cache": (layer("model.layers.0.self_attn.attn", k_scale_float=0.1), r"drawn at random"),
    "derived": (lambda model: vars(model).update(post_load_weights=None), r"derives tensors"),
    "beside": (layer(OUT, packed=torch.zeros(8)), r"o_proj\.packed is no parameter"),
    "computes": (doubled, r"its loader runs aten\.mul\.Tensor on "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_its_kernels_would_read_otherwise_is_refused_when_connecting(case: str, tmp_path: Path) -> None:
    change, reason = REFUSED[case]
    folder = saved(tmp_path, moe=True)
    model = Model(folder)
    host_of(model, folder).checkpoint()
    change(model)
    with pytest.raises(ConfigError, match=rf"quantization_config.*{reason}.*vLLM"):
        host_of(model, folder).checkpoint()


def test_what_sglang_quantises_and_the_configuration_does_not_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(
        ConfigError, match=r"SGLang's layer has weight \(float8_e4m3fn\), weight_scale_inv"
    ) as more:
        host_of(Model(folder, ignored=()), folder).checkpoint()
    assert more.value.field == "quantization_config of model.layers.1.self_attn.o_proj.weight"
    assert more.value.value == "not quantised"
    fused = "model.layers.0.self_attn.qkv_proj"
    with pytest.raises(ConfigError, match=r"SGLang's layer has weight \(bfloat16\): name .*k_proj") as less:
        host_of(Model(folder, ignored=(*BLOCKS["modules_to_not_convert"], fused)), folder).checkpoint()
    assert less.value.field == "quantization_config of model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("quantization", "field", "remedy"),
    [
        (INT4, r"quantization_config of .*q_proj\.weight", "serve this format with vLLM"),
        (BLOCKS | {"quant_method": "gguf"}, r"quantization_config\.quant_method", "fp8"),
        (AWQ, r"quantization_config of .*q_proj\.weight", "serve this format with vLLM"),
        (BLOCKS | {"weight_block_size": None}, r"quantization_config\.weight_block_size", r"\[128, 128\]"),
    ],
)
def test_other_formats_are_refused_before_anything_is_loaded(
    quantization: Mapping[str, Any], field: str, remedy: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, quantization)
    with pytest.raises(ConfigError, match=remedy) as raised:
        host_of(nn.Module(), folder).checkpoint()
    assert re.match(field, raised.value.field)


def test_options_with_which_no_update_is_shown_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    class RowParallelLinearWithLoRA(nn.Module): ...

    model = Model(folder)
    model.add_module("wrapped", RowParallelLinearWithLoRA())
    with pytest.raises(ConfigError, match=r"options\.enable_lora.*have other names"):
        host_of(model, folder).checkpoint()
    speculation = Speculation("EAGLE", str(folder), None)
    settings = RankSettings("e0", str(folder), "bfloat16", speculation)
    host = SglangHost(model, CPU, settings, nn.Module())
    with pytest.raises(ConfigError, match=r"quantization_config.*freeze it"):
        host.draft("trained")
    assert host.draft("frozen") is not None


def test_a_configuration_may_be_an_option_and_weights_in_full_precision_need_none(tmp_path: Path) -> None:
    folder = saved(tmp_path, {})
    given = json.dumps({"quantization_config": BLOCKS})
    assert host_of(Model(folder), folder, overrides=given).checkpoint().converts
    with pytest.raises(
        ConfigError, match=r"Fp8LinearMethod may repack weights.*no load makes up for it.*vLLM"
    ):
        host_of(Model(folder), folder).checkpoint()
    plain = host_of(nn.Module(), folder)
    assert plain.checkpoint().converts == ""
    assert plain.converted() is plain.places() is None
