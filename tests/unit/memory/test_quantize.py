"""Quantised bytes are those of the libraries that made each format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quantised import by_library, check_declared, same_bits, weights
from weightsync.plan.layout.formats import FP4, Format
from weightsync.quantising.quantize import quantize, quantize_together

BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "group": (1, 8), "block": (4, 8)}
CASES = [
    *(("int8", strategy, False, True) for strategy in BLOCKS),
    *(("float8_e4m3fn", strategy, False, True) for strategy in BLOCKS),
    *(
        (values, strategy, True, symmetric)
        for values in ("int4", "int8")
        for strategy in ("channel", "group")
        for symmetric in (True, False)
    ),
]


@pytest.mark.parametrize(("values", "strategy", "packed", "symmetric"), CASES)
@given(data=st.data())
def test_bytes_are_those_of_compressed_tensors(
    values: str, strategy: str, packed: bool, symmetric: bool, data: st.DataObject
) -> None:
    pytest.importorskip("compressed_tensors")
    weight = data.draw(weights(8 if strategy == "group" else 1))
    form = Format(
        rule="compressed-tensors",
        values=values,
        block=BLOCKS[strategy],
        packed=packed,
        symmetric=symmetric,
    )
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    wanted = by_library(weight, form, strategy)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert same_bits(tensor, wanted[name]), name


SMALL_GROUPS = {
    "mxfp4": Format(rule="mx", values=FP4, block=(1, 32), packed=True),
    "mxfp8": Format(rule="mx", values="float8_e4m3fn", block=(1, 32)),
    "nvfp4": Format(rule="nvfp4", values=FP4, block=(1, 16), packed=True),
}


@pytest.mark.parametrize("name", SMALL_GROUPS)
@given(data=st.data())
def test_small_groups_are_those_of_compressed_tensors(name: str, data: st.DataObject) -> None:
    pytest.importorskip("compressed_tensors")
    form = SMALL_GROUPS[name]
    drawn = data.draw(weights(form.block[1]))
    weight = drawn.nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)  # the library says nothing of them
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    wanted = by_library(weight, form, "tensor_group" if form.rule == "nvfp4" else "group")
    wanted.pop("weight_zero_point", None)
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert same_bits(tensor, wanted[key]), key


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_has_a_scale_that_is_not_a_number(value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 40] = value
    scales = dict(quantize(weight, SMALL_GROUPS["mxfp4"]))["weight_scale"]
    assert scales.tolist() == [[125, 125], [125, 255]]


@pytest.mark.parametrize("columns", [0, 8])
@given(data=st.data())
def test_rows_are_those_of_sglang_as_a_processor_without_approximation_has_them(
    columns: int, data: st.DataObject
) -> None:
    """SGLang's kernel for Hopper GPUs, statement by statement, for each row or group of columns."""
    weight = data.draw(weights(columns or 1)).nan_to_num(nan=1.0, posinf=3.0, neginf=-3.0)
    form = Format(rule="sglang", values="float8_e4m3fn", block=(1, columns))
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    scales, rows = [], []
    for row in weight.float().reshape(-1, columns or weight.shape[1]):
        row = np.where(np.abs(row.numpy()) < np.finfo(np.float32).tiny, np.float32(0), row.numpy())
        scale = np.abs(row).max() * np.float32(0.0022321429569274187088)
        scale = scale if scale >= np.finfo(np.float32).tiny else np.float32(0)
        inverse = np.float32(1) / scale if scale else np.float32(0)
        scales.append(scale)
        rows.append(np.clip(row * inverse, np.float32(-448), np.float32(448)))
    wanted = torch.from_numpy(np.stack(rows)).view(weight.shape).to(torch.float8_e4m3fn)
    assert same_bits(found["weight_scale"].flatten(), torch.tensor(np.array(scales, np.float32)))
    assert torch.equal(found["weight"].float(), wanted.float())  # zeros may differ in their sign


EXPERTS = Format(rule="sglang_experts", values="float8_e4m3fn", block=(0, 0))
GATE_AND_UP = replace(EXPERTS, together=("gate_proj", "up_proj"))
LAYER = Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0))


def per_tensor_as_sglang(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``per_tensor_quant_fp8.cuh``, statement by statement: its minimum and maximum pass over NaN."""
    given = weights.float().numpy()
    with np.errstate(all="ignore"):
        scale = np.fmax.reduce(np.abs(given), axis=None, initial=np.float32(0)) / np.float32(448)
        scaled = given * (np.float32(1) / scale)
        clipped = np.fmax(np.fmin(scaled, np.float32(448)), np.float32(-448))
    return torch.from_numpy(clipped).to(torch.float8_e4m3fn), torch.tensor(np.array(scale))


@given(data=st.data())
def test_an_expert_has_one_scale_as_sglang_makes_it(data: st.DataObject) -> None:
    weight = data.draw(weights())
    found = dict(quantize(weight, EXPERTS))
    check_declared(weight, EXPERTS, found)
    values, scale = per_tensor_as_sglang(weight)
    assert same_bits(found["weight"], values)
    assert same_bits(found["weight_scale"], scale.reshape(1))


@pytest.mark.parametrize("num_ranks", [1, 2])
@given(data=st.data())
def test_matrices_that_share_scales_are_quantised_as_one_on_each_rank(
    num_ranks: int, data: st.DataObject
) -> None:
    drawn = data.draw(weights())
    gate, up = torch.cat([drawn] * num_ranks), torch.cat([drawn.flip(0) * 7, drawn])[: num_ranks * len(drawn)]
    form = GATE_AND_UP if num_ranks == 1 else replace(GATE_AND_UP, block=(len(drawn), 0))
    found = [dict(stored) for stored in quantize_together([gate, up], [form] * 2)]
    for weight, each in zip((gate, up), found, strict=True):
        check_declared(weight, form, each)
    for rank in range(num_ranks):
        parts = [torch.chunk(each, num_ranks)[rank] for each in (gate, up)]
        values, scale = per_tensor_as_sglang(torch.cat(parts))
        own = [torch.chunk(each["weight"], num_ranks)[rank] for each in found]
        assert same_bits(torch.cat(own), values)
        for each in found:
            assert same_bits(each["weight_scale"].flatten()[rank], scale)


@pytest.mark.parametrize("num_ranks", [1, 2])
@given(data=st.data())
def test_a_layer_of_unequal_matrices_has_one_scale_on_each_rank(num_ranks: int, data: st.DataObject) -> None:
    """As vLLM makes it of query, key and value projections together."""
    drawn = data.draw(weights())
    matrices = [torch.cat([drawn] * num_ranks), torch.cat([drawn.flip(0) * 7, drawn, drawn] * num_ranks)]
    rows = [0 if num_ranks == 1 else len(each) // num_ranks for each in matrices]
    forms = [replace(LAYER, block=(each, 0)) for each in rows]
    found = [dict(stored) for stored in quantize_together(matrices, forms)]
    for weight, form, each in zip(matrices, forms, found, strict=True):
        check_declared(weight, form, each)
    for rank in range(num_ranks):
        values, scale = per_tensor_as_sglang(torch.cat([each.chunk(num_ranks)[rank] for each in matrices]))
        assert same_bits(torch.cat([each["weight"].chunk(num_ranks)[rank] for each in found]), values)
        for each in found:
            assert same_bits(each["weight_scale"].flatten()[rank], scale)


def test_an_expert_of_zeros_has_the_greatest_values_and_a_scale_of_zero_as_sglang_gives_it() -> None:
    (_, values), (_, scale) = quantize(torch.zeros(4, 8, dtype=torch.bfloat16), EXPERTS)
    assert (values.float() == 448).all()
    assert scale.tolist() == [0]
