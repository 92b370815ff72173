"""Quantised bytes are those of the libraries that made each format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.quantised import by_library, check_declared, same_bits, weights
from weightsync.memory.quantize import quantize
from weightsync.plan.formats import FP4, Format

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
