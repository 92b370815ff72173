"""Quantised bytes do not depend on the device."""

from __future__ import annotations

import pytest
import torch

from tests.quantised import SPECIAL, same_bits
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [(128, 128), (4, 8), (3, 5), (64, 1000)])
@pytest.mark.parametrize("columns", [1, 133, 264])
def test_blocks_of_any_size_and_value(block: tuple[int, int], columns: int, dtype: torch.dtype) -> None:
    form = Format(rule="fp8", values="float8_e4m3fn", block=block)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn(257, columns, generator=draw) * 10.0 ** (3 * seed - 6)
        some = torch.randint(weight.numel(), (len(SPECIAL),), generator=draw)
        weight.view(-1)[some] = torch.tensor(SPECIAL)
        weight[:130, : columns // 2] = 0.0
        wanted = dict(quantize(weight.to(dtype), form))
        found = dict(quantize(weight.to(dtype).cuda(), form))
        differ = {key for key in wanted if not same_bits(found[key].cpu(), wanted[key])}
        assert not differ, (seed, differ)
