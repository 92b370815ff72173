"""Quantised bytes do not depend on the device."""

from __future__ import annotations

import pytest
import torch

from tests.quantised import same_bits
from weightsync.memory.quantize import quantize
from weightsync.plan.formats import FP4, Format

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp8 blocks": Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    "powers of two": Format(rule="fp8", values="float8_e4m3fn", block=(128, 128), powers_of_two=True),
    "fp8 channels": Format(rule="compressed-tensors", values="float8_e4m3fn", block=(1, 0)),
    "int8 channels": Format(rule="compressed-tensors", values="int8", block=(1, 0)),
    "int4 groups": Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True),
    "mxfp4": Format(rule="mx", values=FP4, block=(1, 32), packed=True),
    "mxfp8": Format(rule="mx", values="float8_e4m3fn", block=(1, 32)),
    "nvfp4": Format(rule="nvfp4", values=FP4, block=(1, 16), packed=True),
    "zero points": Format(
        rule="compressed-tensors", values="int4", block=(1, 32), packed=True, symmetric=False
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_quantises_to_the_bytes_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    form = FORMATS[name]
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        weight = (torch.randn(1000, 1536, generator=draw) * 10.0 ** (seed - 5)).to(dtype)
        wanted, found = dict(quantize(weight, form)), dict(quantize(weight.cuda(), form))
        assert wanted.keys() == found.keys()
        differ = {key for key in wanted if not same_bits(found[key].cpu(), wanted[key])}
        assert not differ, (seed, differ)
