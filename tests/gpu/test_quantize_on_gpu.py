"""Quantised bytes do not depend on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.quantised import SPECIAL, same_bits
from weightsync.memory import cuda
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box
from weightsync.plan.layout.formats import FP4, NEAREST, TOGETHER, Format
from weightsync.quantising.group_kernels import can_quantize_groups
from weightsync.quantising.quantize import quantize, quantize_together
from weightsync.quantising.quantize_kernels import MatrixDigests, QuantizedMatrix, QuantizeTable
from weightsync.quantising.shared_scale_table import SharedScaleTable

pytestmark = pytest.mark.gpu

FORMATS = {
    "fp8 blocks": Format(rule="fp8", values="float8_e4m3fn", block=(128, 128)),
    "powers of two": Format(rule="fp8", values="float8_e4m3fn", block=(128, 128), powers_of_two=True),
    "fp8 channels": Format(rule="compressed-tensors", values="float8_e4m3fn", block=(1, 0)),
    "int8 channels": Format(rule="compressed-tensors", values="int8", block=(1, 0)),
    "int4 groups": Format(rule="compressed-tensors", values="int4", block=(1, 32), packed=True),
    "awq": Format(rule="awq", values="int4", block=(1, 128), packed=True, symmetric=False),
    "gptq": Format(rule="gptq", values="int4", block=(1, 32), packed=True),
    "gptq int8": Format(rule="gptq", values="int8", block=(1, 0), packed=True),
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


GROUPED = {
    **{
        f"{values} {'groups' if group else 'channels'}{'' if symmetric else ', zero points'}": Format(
            rule="compressed-tensors", values=values, block=(1, group), packed=True, symmetric=symmetric
        )
        for values in ("int4", "int8")
        for group in (32, 0)
        for symmetric in (True, False)
    },
    "int4 groups of 8": Format(rule="compressed-tensors", values="int4", block=(1, 8), packed=True),
    "awq groups": FORMATS["awq"],
    "awq channels": Format(rule="awq", values="int4", block=(1, 0), packed=True, symmetric=False),
    "gptq groups": FORMATS["gptq"],
    "gptq channels": Format(rule="gptq", values="int4", block=(1, 0), packed=True),
    "gptq int8 groups": Format(rule="gptq", values="int8", block=(1, 64), packed=True),
    "gptq int8 channels": FORMATS["gptq int8"],
}
"""Formats with words of int32 and a scale for each group of columns."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (7, 133), (65, 1000), (130, 133), (1, 12288), (130, 12288)])
@pytest.mark.parametrize("name", GROUPED)
def test_words_of_groups_of_any_size_and_value(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sizes are the next that the format can have: of whole groups, and of whole words for AWQ and GPTQ."""
    form, (rows, columns) = GROUPED[name], shape
    word, is_nearest = 32 // form.num_bits, form.rule in NEAREST
    rows += -rows % word if is_nearest else 0
    columns += -columns % (form.block[1] or (word if is_nearest else 1))
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=draw) * 10.0 ** (3 * seed - 6)
        some = torch.randint(weight.numel(), (len(SPECIAL),), generator=draw)
        weight.view(-1)[some] = torch.tensor(SPECIAL) if seed < 3 else 0.0
        weight[rows // 2, : form.block[1] or columns] = 0.0
        given = weight.to(dtype)
        wanted = dict(quantize(given, form))
        for first in (0, 1):  # aligned for wide loads, and not
            held = torch.empty(first + given.numel(), dtype=dtype, device="cuda")[first:].view(given.shape)
            found = dict(quantize(held.copy_(given), form))
            assert [*wanted] == [*found]
            differ = {key for key in wanted if not same_bits(found[key].cpu(), wanted[key])}
            assert not differ, (seed, first, differ)


@pytest.mark.parametrize("name", GROUPED)
def test_kernels_make_words_and_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = list[str](), cuda.launch

    def record(kernel: str, *args: Any) -> None:
        launched.append(kernel)
        launch(kernel, *args)

    monkeypatch.setattr(cuda, "launch", record)
    form, weight = GROUPED[name], torch.ones(8, 128, device="cuda")
    assert can_quantize_groups(weight, form)
    assert [*dict(quantize(weight, form))] == [*form.suffixes]
    rule = form.rule.removesuffix("-tensors")
    assert launched == [f"{rule}_{kind}_{form.values}_float32" for kind in ("scales", "words")]


def test_matrices_that_the_kernels_do_not_take_have_the_same_bytes() -> None:
    """With gaps between rows, and with words that cross groups."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2 * 96, generator=draw).bfloat16()
    crossing = Format(rule="compressed-tensors", values="int4", block=(1, 12), packed=True, symmetric=False)
    for form, part in ((FORMATS["gptq"], weight[:, :96]), (crossing, weight)):
        device = weight.cuda()[:, : part.shape[1]]
        assert not can_quantize_groups(device, form)
        wanted, found = dict(quantize(part, form)), dict(quantize(device, form))
        differ = {key for key in wanted if not same_bits(found[key].cpu(), wanted[key])}
        assert not differ


SGLANG = Format(rule="sglang", values="float8_e4m3fn", block=(1, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1000, 1536), (3000, 133)])
def test_sglangs_rows_have_the_scales_of_a_cpu_and_values_beside_its_own(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The reciprocal is approximate: where it is another float, a value near a tie is rounded otherwise."""
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        weight = (torch.randn(shape, generator=draw) * 10.0 ** (seed - 5)).to(dtype)
        weight[7] = 0
        (_, values), (_, scales) = quantize(weight, SGLANG)
        (_, found), (_, found_scales) = quantize(weight.cuda(), SGLANG)
        assert same_bits(found_scales.cpu(), scales)
        steps = (found.cpu().view(torch.uint8).int() - values.view(torch.uint8).int()).abs()
        assert steps.max() <= 1
        assert steps.float().mean() < 1e-3


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize("columns", [1, 133, 264, 2048])
@pytest.mark.parametrize("halves", [1, 2])
def test_matrices_that_share_scales(halves: int, columns: int, rule: str, dtype: torch.dtype) -> None:
    """Of one block each, and of several, which jut out."""
    sizes = (300, 57)
    across = 0 if halves == 1 or columns == 1 else -(-columns // halves)
    forms = [
        Format(rule=rule, values="float8_e4m3fn", block=(0 if halves == 1 else -(-rows // halves), across))
        for rows in sizes
    ]
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        weights = [torch.randn(rows, columns, generator=draw) * 10.0 ** (3 * seed - 6) for rows in sizes]
        some = torch.randint(weights[0].numel(), (len(SPECIAL),), generator=draw)
        weights[0].view(-1)[some] = torch.tensor(SPECIAL) if seed < 4 else 0.0
        weights[1][30:] = 0.0
        given = [weight.to(dtype) for weight in weights]
        wanted = [*map(dict, quantize_together(given, forms))]
        found = [*map(dict, quantize_together([weight.cuda() for weight in given], forms))]
        for theirs, ours in zip(wanted, found, strict=True):
            differ = {key for key in theirs if not same_bits(ours[key].cpu(), theirs[key])}
            assert not differ, (seed, differ)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1, 133, 264, 4096, 17000])
def test_parts_that_share_one_scale_and_their_digests(columns: int, dtype: torch.dtype) -> None:
    """Two groups of matrices: of one with itself alone, and of two, the second of a wider tensor."""
    whole = Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0))
    part = Format(rule="vllm_online", values="float8_e4m3fn", block=(300, columns))
    forms, sizes, width = (whole, whole, part), (70, 57, 300), 3 * columns
    sources, stored = (torch.zeros(6, dtype=torch.int64, device="cuda") for _ in range(2))
    held = [torch.empty(rows, columns, dtype=dtype, device="cuda") for rows in sizes]
    values = [torch.empty(each.shape, dtype=torch.float8_e4m3fn, device="cuda") for each in held]
    scales = torch.empty(2, 1, device="cuda")
    digests = [MatrixDigests(number, columns, 2 * number, 2 * number + 1) for number in range(2)]
    digests.append(MatrixDigests(2, width, 4, 5, row=300, stored_row=600, column=2 * columns))
    matrices = [
        QuantizedMatrix.of(held[number], forms[number], values[number], scales[group], digests[number])
        for number, group in enumerate((0, 1, 1))
    ]
    table = SharedScaleTable([matrices[:1], matrices[1:]], sources, stored)
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        given = [
            (torch.randn(each.shape, generator=draw) * 10.0 ** (3 * seed - 6)).to(dtype) for each in held
        ]
        some = torch.randint(given[1].numel(), (len(SPECIAL),), generator=draw)
        given[1].view(-1)[some] = torch.tensor(SPECIAL).to(dtype) if seed < 4 else 0.0
        given[0] *= seed % 2
        for target, data in zip(held, given, strict=True):
            target.copy_(data)
        sources.zero_()
        stored.zero_()
        table.launch(torch.cuda.current_stream())
        (first,) = quantize_together(given[:1], forms[:1])
        wanted = [dict(each) for each in (first, *quantize_together(given[1:], forms[1:]))]
        boxes = [Box.whole(tuple(each.shape)) for each in given[:2]]
        read, made = ([*boxes, Box((row, 2 * columns), (300, columns))] for row in (300, 600))
        of_scales = [Box.whole((1, 1))] * 2 + [Box((2, 2), (1, 1))]
        expected = list[int]()
        for number, its in enumerate(wanted):
            assert same_bits(values[number].cpu(), its["weight"]), (seed, number)
            scale = scales[min(number, 1)].cpu()
            assert same_bits(scale, its["weight_scale"].flatten()), (seed, number)
            shape = (900, width) if number == 2 else given[number].shape
            expected.append(tensor_digest(its["weight"], shape, made[number]))
            shape = (3, 3) if number == 2 else (1, 1)
            expected.append(tensor_digest(scale.view(1, 1), shape, of_scales[number]))
        assert stored.cpu().numpy().view(np.uint64).tolist() == expected
        shapes = [*(each.shape for each in given[:2]), (600, width)]
        came = [tensor_digest(*each) for each in zip(given, shapes, read, strict=True)]
        assert sources.cpu().numpy().view(np.uint64).tolist() == [*came, 0, 0, 0]


def test_what_changes_between_the_two_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Format(rule="vllm_online", values="float8_e4m3fn", block=(0, 0))
    held = [torch.randn(64, 512, device="cuda").bfloat16() for _ in range(3)]
    values, scales = [each.to(torch.float8_e4m3fn) for each in held], torch.empty(3, 1, device="cuda")
    digests = torch.zeros((2, 6), dtype=torch.int64, device="cuda")
    groups = []
    for number, weight in enumerate(held):
        parts = MatrixDigests(number, 512, 2 * number, 2 * number + 1)
        groups.append([QuantizedMatrix.of(weight, form, values[number], scales[number], parts)])
    table, launch = SharedScaleTable(groups, *digests), cuda.launch
    table.launch(torch.cuda.current_stream())
    assert table.changed() == []

    def write_first(kernel: str, *args: Any) -> None:
        if "values" in kernel:
            held[1][63, 511] = 99.0
        launch(kernel, *args)

    monkeypatch.setattr(cuda, "launch", write_first)
    table.launch(torch.cuda.current_stream())
    assert table.changed() == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 channels", "int8 channels"])
@pytest.mark.parametrize("shape", [(1000, 1536), (700, 133), (8192, 264)])
def test_digests_of_what_is_read_and_made(shape: tuple[int, int], name: str, dtype: torch.dtype) -> None:
    form = FORMATS[name]
    block, grid = form.block[0], form.grid(shape)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = [weight, *(data.float() if data.dtype == dtype else data for _, data in quantize(weight, form))]
    device = weight.cuda()
    values = torch.zeros(shape, dtype=wanted[1].dtype, device="cuda")
    scales = torch.zeros(grid, device="cuda")
    cut = 3 * block
    parts = [
        QuantizedMatrix.of(
            device[first:end],
            form,
            values[first:end],
            scales[first // block : -(-end // block)],
            MatrixDigests(2, shape[1], 0, 1, row=first, stored_row=first),
        )
        for first, end in [(0, cut), (cut, shape[0])]
    ]
    other = torch.empty_like(values[:block]), torch.empty_like(scales[:1])
    parts.append(QuantizedMatrix.of(device[:block], form, *other, MatrixDigests(3, shape[1])))
    sources, stored = (torch.zeros(4, dtype=torch.int64, device="cuda") for _ in range(2))
    table = QuantizeTable(parts, sources, stored)
    for times in (1, 2):  # launches add up
        table.launch(torch.cuda.current_stream())
        of_source, of_values, of_scales = (tensor_digest(each, each.shape) for each in wanted)
        of_block = tensor_digest(weight[:block], (block, shape[1]))
        wanted_sources, wanted_stored = [0, 0, of_source, of_block], [of_values, of_scales, 0, 0]
        for found, digests in ((sources, wanted_sources), (stored, wanted_stored)):
            assert found.cpu().numpy().view(np.uint64).tolist() == [times * each % 2**64 for each in digests]
    assert same_bits(values.cpu(), wanted[1])
    assert same_bits(scales.cpu(), wanted[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(700, 1536), (300, 1541)])
def test_digests_of_columns_and_of_an_expert_in_a_stack(shape: tuple[int, int], dtype: torch.dtype) -> None:
    form, (rows, columns) = FORMATS["fp8 blocks"], shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = [weight, *(data for _, data in quantize(weight, form))]
    sources, stored = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(2))
    matrices, kept = [], []
    for first, end in [(0, 640), (640, columns)]:
        data = weight[:, first:end].contiguous().cuda()
        values = torch.zeros(data.shape, dtype=wanted[1].dtype, device="cuda")
        scales = torch.zeros(form.grid(data.shape), device="cuda")
        digests = MatrixDigests(2, columns, 0, 1, row=2 * rows, column=first)
        matrices.append(QuantizedMatrix.of(data, form, values, scales, digests))
        kept.append((data, values, scales))
    QuantizeTable(matrices, sources, stored).launch(torch.cuda.current_stream())
    box = Box((2, 0, 0), (1, *shape))
    found = [each.cpu().numpy().view(np.uint64).tolist() for each in (sources, stored)]
    assert found[0] == [0, 0, tensor_digest(weight[None], (4, *shape), box)]
    assert found[1] == [*(tensor_digest(each, each.shape) for each in wanted[1:]), 0]
    assert same_bits(torch.hstack([each[1] for each in kept]).cpu(), wanted[1])
    assert same_bits(torch.hstack([each[2] for each in kept]).cpu(), wanted[2])
