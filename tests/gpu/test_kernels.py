"""The kernels against PyTorch and the CPU's digest: any layout, and no byte beside it touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.memory.test_digest_tiles import part_of
from weightsync.memory.kernels.device_kernels import CopyTable, DigestTable
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.nonfinite import MASKS, count_nonfinite, word_mask
from weightsync.plan import Box
from weightsync.plan.layout.copies import Copies, Copy, box_copies

pytestmark = pytest.mark.gpu

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = 0xA5


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def copies_of(source: torch.Tensor, target: torch.Tensor) -> list[Copy]:
    """`source` to `target`, two views of one shape and item size."""
    size = source.element_size()
    strides = [[stride * size for stride in side.stride()] for side in (source, target)]
    box = (source.shape, size, source.data_ptr(), strides[0], target.data_ptr(), strides[1])
    return [tuple(row) for row in box_copies([box])[0].tolist()]


def copy(rows: list[Copy], num_blocks: int | None = None) -> None:
    table = CopyTable(Copies.of(rows), [0, len(rows)], num_blocks)
    table.launch(0, torch.cuda.current_stream())
    torch.cuda.synchronize()


@st.composite
def layouts(
    draw: st.DrawFn, extent: tuple[int, ...], order: Sequence[int]
) -> tuple[int, tuple[int, ...], int]:
    """(first element, strides, elements of the memory) of a box cut out of a larger tensor."""
    strides, stride = [0] * len(extent), 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= extent[axis] + draw(st.sampled_from([0, 0, 0, 1, 8, 16]))
    start = draw(st.sampled_from([0, 0, 1, 2, 4, 8, 16]))
    return start, tuple(strides), start + stride


@settings(max_examples=150)
@given(st.data())
def test_any_box_to_any_layout(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 3, 8, 16, 33, 64, 128])
    extent = tuple(data.draw(st.lists(sizes, max_size=3)))
    check_any_layout(data, extent, [tuple(range(len(extent)))] * 2)


@settings(max_examples=200)
@given(st.data())
def test_any_box_to_any_transposed_layout(data: st.DataObject) -> None:
    sizes = st.sampled_from([31, 32, 33, 64, 96, 128, 130, 200, 256, 258])
    small = st.sampled_from([1, 2, 3])
    extent = tuple(data.draw(st.permutations([data.draw(sizes), data.draw(sizes), data.draw(small)])))
    orders = st.permutations(range(len(extent)))
    check_any_layout(data, extent, [data.draw(orders), data.draw(orders)])


def check_any_layout(data: st.DataObject, extent: tuple[int, ...], orders: Sequence[Sequence[int]]) -> None:
    """Copy a box between memories that store its dimensions in these orders, the outermost first."""
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    sides = [data.draw(layouts(extent, order)) for order in orders]
    memories = [random_bytes(sides[0][2] * itemsize), torch.empty(0), torch.empty(0)]
    memories[1] = torch.full((sides[1][2] * itemsize + 256,), POISON, dtype=torch.uint8, device="cuda")
    memories[2] = memories[1].clone()
    source, target, expected = (
        memory.view(DTYPES[itemsize]).as_strided(extent, strides, start)
        for memory, (start, strides, _) in zip(memories, [sides[0], sides[1], sides[1]], strict=True)
    )
    expected.copy_(source)
    copy(copies_of(source, target), data.draw(st.sampled_from([None, 1, 7])))
    assert torch.equal(memories[1], memories[2])


@pytest.mark.parametrize("columns", [(0, 4096), (0, 512), (1536, 4608), (3, 1027), (8, 9)])
def test_large_boxes_both_ways(columns: tuple[int, int]) -> None:
    whole = random_bytes(8192 * 4608 * 2).view(torch.int16).reshape(8192, 4608)
    part = whole[:, slice(*columns)]
    packed = torch.empty(part.shape, dtype=part.dtype, device="cuda")
    copy(copies_of(part, packed))
    assert torch.equal(packed, part)
    other = torch.zeros_like(whole)
    copy(copies_of(packed, other[:, slice(*columns)]))
    expected = torch.zeros_like(whole)
    expected[:, slice(*columns)] = part
    assert torch.equal(other, expected)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 768), (768, 2048), (1000, 1407)])
def test_stacks_of_transposed_matrices_both_ways(inputs: int, outputs: int, itemsize: int) -> None:
    dtype = DTYPES[itemsize]
    stack = random_bytes(6 * inputs * outputs * itemsize).view(dtype).view(6, inputs, outputs)
    turned = torch.empty(6, outputs, inputs, dtype=dtype, device="cuda")
    copy(copies_of(stack.mT, turned))
    assert torch.equal(turned, stack.mT)
    back = torch.zeros_like(stack)
    copy(copies_of(turned[1:5], back.mT[1:5]), 5)
    assert torch.equal(back[1:5], stack[1:5])
    assert not back[[0, 5]].any()


def test_a_group_is_transposed_and_copied_in_its_own_launch() -> None:
    source, target = (
        random_bytes(3 << 20).view(torch.int16),
        torch.zeros(3 << 19, dtype=torch.int16, device="cuda"),
    )
    sources, targets = source.view(3, 512, 1024), target.view(3, 1024, 512)
    rows = [copies_of(sources[i].mT, targets[i]) for i in range(3)]
    rows[1] += copies_of(source[:100], tail := torch.zeros(100, dtype=torch.int16, device="cuda"))
    bounds = [0, len(rows[0]), len(rows[0]) + len(rows[1]), sum(map(len, rows))]
    table = CopyTable(Copies.of([row for group in rows for row in group]), bounds)
    for group in (1, 2, 0):
        table.launch(group, torch.cuda.current_stream())
        torch.cuda.synchronize()
        done = [torch.equal(targets[i], sources[i].mT) for i in range(3)]
        assert done == {1: [False, True, False], 2: [False, True, True], 0: [True, True, True]}[group]
        assert torch.equal(tail, source[:100])


def test_each_group_is_its_own_launch() -> None:
    source = random_bytes(3 << 20)
    target = torch.zeros_like(source)
    thirds = list(zip(source.chunk(3), target.chunk(3), strict=True))
    rows = [row for pair in thirds for row in copies_of(*pair)]
    table = CopyTable(Copies.of(rows), [0, 2, 2, 3])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    table.launch(1, stream)
    table.launch(2, stream)
    stream.synchronize()
    assert [torch.equal(a, b) for a, b in thirds] == [False, False, True]
    assert int(target[: 2 << 20].max()) == 0
    table.launch(0, stream)
    stream.synchronize()
    assert torch.equal(source, target)


def test_no_copies_at_all() -> None:
    table = CopyTable(Copies.of([]), [0, 0])
    table.launch(0, torch.cuda.current_stream())
    torch.cuda.synchronize()


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, size - 1)) // 8 * 8 for size in shape]
    high = [
        draw(st.sampled_from([size, draw(st.integers(at + 1, size))]))
        for at, size in zip(low, shape, strict=True)
    ]
    return Box(tuple(low), tuple(h - at for h, at in zip(high, low, strict=True)))


@settings(max_examples=150)
@given(st.data())
def test_the_digest_is_the_cpus(data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 3, 16, 64, 100, 512, 4096, 4104])
    shape = tuple(data.draw(st.lists(sizes, max_size=2)))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    start = data.draw(st.sampled_from([0, 0, 1, 8])) * itemsize
    memory = random_bytes(start + math.prod(shape) * itemsize)
    if data.draw(st.booleans()):
        memory.fill_(255)
    whole = memory[start:].view(DTYPES[itemsize]).reshape(shape)
    boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    table = DigestTable([part_of(whole, box, number) for number, box in enumerate(boxes)], len(boxes))
    expected = [tensor_digest(whole[box.slices()].cpu(), shape, box) for box in boxes]
    for _ in range(2):
        table.launch(torch.cuda.current_stream())
        assert table.result().tolist() == expected


def halves_of(shape: tuple[int, ...], axis: int) -> list[Box]:
    bounds = 0, shape[axis] // 2, shape[axis]
    return [
        Box(
            tuple(start if at == axis else 0 for at in range(len(shape))),
            tuple(end - start if at == axis else size for at, size in enumerate(shape)),
        )
        for start, end in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize("axis", [0, 1])
def test_many_tensors_of_all_word_sizes_in_one_table(axis: int) -> None:
    tensors = [
        random_bytes(rows * 4608 * itemsize, seed).view(DTYPES[itemsize]).reshape(rows, 4608)
        for seed, (rows, itemsize) in enumerate([(3000, 2), (500, 1), (1, 4), (700, 8), (40, 2), (999, 4)])
    ]
    halves = [half for tensor in tensors for half in halves_of(tuple(tensor.shape), axis)]
    parts = [part_of(tensors[i // 2], box, i // 2) for i, box in enumerate(halves)]
    table = DigestTable(parts, len(tensors) + 1, num_blocks=50)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    table.launch(stream)
    expected = [tensor_digest(tensor.cpu(), tensor.shape) for tensor in tensors]
    assert table.result().tolist() == [*expected, 0]


@pytest.mark.parametrize("dtype", MASKS)
@pytest.mark.parametrize(
    "columns", [(0, 512), (3, 515), (0, 640)], ids=["in units", "in words", "without gaps"]
)
def test_tensors_with_nan_or_inf_are_flagged_wherever_it_is(dtype: str, columns: tuple[int, int]) -> None:
    shape = (300, columns[1] - columns[0])
    wide = [torch.randn(300, 640, device="cuda").to(getattr(torch, dtype)) for _ in range(8)]
    tensors = [each[:, slice(*columns)] for each in wide]
    worst = [float("nan"), float("nan") if "e4m3" in dtype else float("-inf")]
    for tensor, row, column, value in [(1, 0, 0, 0), (3, 299, 511, 1), (4, 150, 7, 0), (6, 31, 500, 1)]:
        tensors[tensor][row, column] = worst[value]
    if dtype != "float64":  # the lower word of its largest number has all bits
        tensors[7].fill_(torch.finfo(tensors[7].dtype).max)
    parts = [
        replace(part_of(each, Box((0, 0), shape), i), mask=word_mask(dtype)) for i, each in enumerate(tensors)
    ]
    table = DigestTable(parts, len(parts))
    for _ in range(2):
        table.launch(torch.cuda.current_stream())
        assert table.flagged() == [1, 3, 4, 6]
        assert table.result().tolist() == [tensor_digest(each.cpu(), shape) for each in tensors]
    assert [count_nonfinite(each) for each in tensors] == [0, 1, 0, 1, 1, 0, 1, 0]
    blind = DigestTable([replace(part, mask=0) for part in parts], len(parts))
    blind.launch(torch.cuda.current_stream())
    assert blind.flagged() == []


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_one_flipped_bit_changes_it(itemsize: int) -> None:
    memory = random_bytes(5_000_000 * itemsize)
    whole = memory.view(DTYPES[itemsize])
    before = tensor_digest(whole, whole.shape)
    for byte in (0, 32_767, 32_768, len(memory) // 2 + 5, len(memory) - 1):
        memory[byte] ^= 16
        assert tensor_digest(whole, whole.shape) != before
        memory[byte] ^= 16
    assert tensor_digest(whole, whole.shape) == before


def test_a_device_tensors_digest_is_its_host_copys() -> None:
    whole = torch.randn(300, 700, device="cuda").to(torch.bfloat16)
    box = Box((100, 200), (50, 333))
    for data, shape, where in [
        (whole, (300, 700), None),
        (whole.T, (700, 300), None),
        (whole[box.slices()], (300, 700), box),
        (whole[0, 0], (), None),
        (whole[:0], (0, 700), None),
    ]:
        assert tensor_digest(data, shape, where) == tensor_digest(data.cpu(), shape, where)
