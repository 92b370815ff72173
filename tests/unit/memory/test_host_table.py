"""One call digests and copies many parts, as `tensor_digest` does one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.memory.kernels import host_table
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.memory.kernels.host_table import HostPart, HostTable
from weightsync.memory.kernels.nonfinite import MASKS, count_nonfinite
from weightsync.plan import Box

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float64, torch.float8_e4m3fn]
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    """One, and boxes that cut its first dimension."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
    axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
    if not shape:
        return data, [Box((), ())]
    at = draw(st.integers(0, shape[axis]))
    boxes = []
    for low, high in ((0, at), (at, shape[axis])):
        offset, extent = [0] * len(shape), list(shape)
        offset[axis], extent[axis] = low, high - low
        boxes.append(Box(tuple(offset), tuple(extent)))
    return data, boxes


def run(table: HostTable) -> list[int]:
    table.run_all()
    return table.digests().tolist()


@pytest.mark.parametrize("range_cost", [1, 200, 1 << 30])
def test_digests_add_up_to_the_tensors_and_targets_have_the_bytes(
    monkeypatch: pytest.MonkeyPatch, range_cost: int
) -> None:
    monkeypatch.setattr(host_table, "_RANGE_COST", range_cost)

    @given(st.lists(tensors(), max_size=6))
    def check(made: list[tuple[torch.Tensor, list[Box]]]) -> None:
        parts, kept = [], []
        for number, (data, boxes) in enumerate(made):
            for box in boxes:
                source = data[box.slices()].contiguous()
                target = torch.zeros_like(source)
                kept.append((source, target))
                parts.append(
                    HostPart(
                        tensor=number,
                        address=source.data_ptr(),
                        box=box,
                        shape=tuple(data.shape),
                        itemsize=data.element_size(),
                        target=target.data_ptr(),
                        mask=MASKS.get(str(data.dtype).removeprefix("torch."), 0),
                    )
                )
        table = HostTable(parts, len(made))
        wanted = [tensor_digest(data, data.shape) for data, _ in made]
        for _ in range(2):
            assert run(table) == wanted
            for source, target in kept:
                assert torch.equal(source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))
                target.zero_()
        assert table.counts.sum() == 0
        for first, end in table.ranges:
            table.run(first, end, count=True)
        assert table.digests().tolist() == wanted
        assert table.counts.tolist() == [count_nonfinite(source) for source, _ in kept]

    check()


def test_what_has_no_target_is_digested_where_it_is() -> None:
    data = torch.arange(5000, dtype=torch.float32)
    part = HostPart(tensor=1, address=data.data_ptr(), box=Box((0,), (5000,)), shape=(5000,), itemsize=4)
    table = HostTable([part], 3)
    assert run(table) == [0, tensor_digest(data, data.shape), 0]
    data[3] = -1
    assert run(table) == [0, tensor_digest(data, data.shape), 0]


def test_what_has_no_digest_is_copied_alone() -> None:
    data, target = torch.arange(5000, dtype=torch.float32), torch.zeros(5000)
    sides = {"address": data.data_ptr(), "target": target.data_ptr()}
    part = HostPart(tensor=-1, box=Box((0,), (5000,)), shape=(5000,), itemsize=4, **sides)
    assert run(HostTable([part], 0)) == []
    assert torch.equal(data, target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [200_001, 262_144])
@pytest.mark.parametrize("copies", [True, False])
def test_long_parts_are_copied_and_digested_in_blocks(dtype: torch.dtype, columns: int, copies: bool) -> None:
    numbers = torch.arange(3 * columns * dtype.itemsize, dtype=torch.int64)
    data = (numbers * 31 % 251).to(torch.uint8).view(dtype).view(3, columns)
    target = torch.zeros_like(data)
    parts = [
        HostPart(
            tensor=0,
            address=data[row:].data_ptr(),
            box=Box((row, 0), (rows, columns)),
            shape=(3, columns),
            itemsize=dtype.itemsize,
            target=target[row:].data_ptr() if copies else 0,
            mask=MASKS.get(str(dtype).removeprefix("torch."), 0),
        )
        for row, rows in ((0, 1), (1, 2))
    ]
    table = HostTable(parts, 1)
    assert run(table) == [tensor_digest(data, data.shape)]
    table.run(0, 2, count=True)
    assert table.digests().tolist() == [tensor_digest(data, data.shape)]
    assert table.counts.tolist() == [count_nonfinite(data[:1]), count_nonfinite(data[1:])]
    if copies:
        assert torch.equal(target.view(torch.uint8), data.view(torch.uint8))
