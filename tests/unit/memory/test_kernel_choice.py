"""Which kernel takes a matrix, as if it were on a GPU with float8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightsync.plan.layout.formats import Format
from weightsync.quantising import quantize_kernels
from weightsync.quantising.quantize_kernels import can_quantize
from weightsync.quantising.shared_scale_table import can_share_scale

BLOCKS = Format(rule="fp8", values="float8_e4m3fn", block=(4, 8))
WHOLE = Format(rule="compressed-tensors", values="float8_e4m3fn", block=(0, 0))
SHARED = Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0))
WEIGHT = torch.zeros(8, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "weight", "alone", "together"),
    [
        (BLOCKS, WEIGHT, True, False),
        (replace(BLOCKS, block=(1, 0)), WEIGHT, True, False),
        (replace(BLOCKS, block=(512, 512)), WEIGHT, False, False),
        (replace(BLOCKS, powers_of_two=True), WEIGHT, False, False),
        (WHOLE, WEIGHT, False, False),
        (SHARED, WEIGHT, False, True),
        (replace(SHARED, block=(8, 0)), WEIGHT, False, True),
        (replace(SHARED, block=(4, 0)), WEIGHT, False, False),
        (SHARED, WEIGHT.t(), False, False),
        (SHARED, WEIGHT.double(), False, False),
        (SHARED, WEIGHT[:0], False, False),
    ],
)
def test_each_matrix_has_the_kernel_of_its_format_or_none(
    form: Format, weight: torch.Tensor, alone: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_kernels, "has_float8", lambda _: True)
    assert (can_quantize(weight, form), can_share_scale(weight, form)) == (alone, together)


def test_a_cpu_has_no_kernel() -> None:
    assert not can_quantize(WEIGHT, BLOCKS)
    assert not can_share_scale(WEIGHT, SHARED)
