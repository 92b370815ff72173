"""What AWQ and GPTQ engines get has the bytes of vLLM's own packing, and gives back the weights."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quantised import DTYPES, by_vllm, check_declared, dequantised, same_bits
from weightsync.plan.layout.formats import Format
from weightsync.quantising.quantize import quantize

CASES = [("awq", 4), ("gptq", 4), ("gptq", 8)]


def form_of(rule: str, bits: int, group: int) -> Format:
    return Format(rule=rule, values=f"int{bits}", block=(1, group), packed=True, symmetric=rule == "gptq")


@st.composite
def matrices(draw: st.DrawFn, group: int) -> torch.Tensor:
    """Values of both signs in each group, of which some are zeros, or far from the rest of their group."""
    rows, columns = 8 * draw(st.integers(1, 4)), (group or 32) * draw(st.integers(1, 5))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensor = torch.randn(rows, columns, generator=seed) * 10.0 ** draw(st.integers(-2, 2))
    for factor in draw(st.lists(st.sampled_from((0.0, -0.0, 40.0)), max_size=3)):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] *= factor
    return tensor.to(draw(st.sampled_from(DTYPES)))


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
@pytest.mark.parametrize(("rule", "bits"), CASES)
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@given(data=st.data())
def test_bytes_are_vllms(rule: str, bits: int, group: int, data: st.DataObject) -> None:
    weight, form = data.draw(matrices(group)), form_of(rule, bits, group)
    found = dict(quantize(weight, form))
    check_declared(weight, form, found)
    wanted = by_vllm(weight, form)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert same_bits(tensor, wanted[name]), name


@pytest.mark.parametrize(("rule", "bits"), CASES)
@given(data=st.data(), shift=st.sampled_from([-100.0, 0.0, 100.0]))
def test_the_formats_definition_gives_back_each_weight_within_half_a_step(
    rule: str, bits: int, data: st.DataObject, shift: float
) -> None:
    """Also where all weights of a group have the same sign, or are zeros."""
    weight, form = data.draw(matrices(32)).float() + shift, form_of(rule, bits, 32)
    weight[data.draw(st.integers(0, len(weight) - 1))] = 0
    found = dict(quantize(weight, form))
    steps = found["scales"].T.repeat_interleave(32, 1)
    assert ((dequantised(found, form) - weight).abs() <= steps * 0.5001).all()
    assert not dequantised(found, form)[(weight == 0).all(1)].any()


@pytest.mark.parametrize(("rule", "bits"), CASES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_has_a_scale_that_is_not_finite(
    rule: str, bits: int, value: float
) -> None:
    """Other groups have the bytes that they would have without it."""
    form, weight = form_of(rule, bits, 32), torch.linspace(-1, 1, 8 * 96).reshape(8, 96).bfloat16()
    finite = dict(quantize(weight, form))
    weight[3, 40] = value
    found = dict(quantize(weight, form))
    assert (~found["scales"].isfinite()).nonzero().tolist() == [[1, 3]]
    differ = dequantised(found, form) != dequantised(finite, form)
    assert {*differ.nonzero()[:, 0].tolist()} == {3}
    assert {*differ.nonzero()[:, 1].tolist()} <= {*range(32, 64)}


@pytest.mark.parametrize(("rule", "bits"), CASES)
@given(data=st.data())
def test_rows_of_a_matrix_have_the_values_that_they_have_in_the_whole(
    rule: str, bits: int, data: st.DataObject
) -> None:
    weight, form = data.draw(matrices(32)), form_of(rule, bits, 32)
    whole = dequantised(dict(quantize(weight, form)), form)
    cut = 8 * data.draw(st.integers(0, len(weight) // 8))
    parts = [part for part in (weight[:cut], weight[cut:]) if len(part)]
    assert same_bits(torch.cat([dequantised(dict(quantize(part, form)), form) for part in parts]), whole)
