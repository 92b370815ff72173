"""The digest: the same for every sharding, another for every fault."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float64, torch.bool]
WRAP = 2**64


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box((0,) * len(shape), shape)]
    for axis in range(len(shape)):
        at = draw(st.integers(0, shape[axis]))
        boxes = [part for box in boxes for part in _cut(box, axis, at)]
    return boxes


def _cut(box: Box, axis: int, at: int) -> list[Box]:
    low, high = list(box.extent), list(box.extent)
    low[axis], high[axis] = at, box.extent[axis] - at
    offset = list(box.offset)
    offset[axis] += at
    return [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]


@given(st.data())
def test_the_shards_digests_add_up_to_the_whole_for_any_sharding(data: st.DataObject) -> None:
    whole = data.draw(tensors())
    boxes = data.draw(cuts(tuple(whole.shape)))
    shares = [tensor_digest(whole[box.slices()], whole.shape, box) for box in boxes]
    assert sum(shares) % WRAP == tensor_digest(whole, whole.shape)


def test_shards_add_up_across_the_digests_inner_rows() -> None:
    whole = torch.randn(3, 10_001)
    for at in (1, 4095, 4096, 4097, 8193):
        parts = [Box((0, 0), (3, at)), Box((0, at), (3, 10_001 - at))]
        shares = [tensor_digest(whole[box.slices()], whole.shape, box) for box in parts]
        assert sum(shares) % WRAP == tensor_digest(whole, whole.shape)


@given(st.data())
def test_one_flipped_bit_changes_it(data: st.DataObject) -> None:
    whole = data.draw(tensors())
    before = tensor_digest(whole, whole.shape)
    flat = whole.reshape(-1).view(torch.uint8)
    byte = data.draw(st.integers(0, flat.numel() - 1))
    flat[byte] ^= 1 << (0 if whole.dtype is torch.bool else data.draw(st.integers(0, 7)))
    assert tensor_digest(whole, whole.shape) != before


@given(st.data())
def test_two_swapped_elements_change_it(data: st.DataObject) -> None:
    whole = torch.arange(
        data.draw(st.integers(2, 5000)), dtype=data.draw(st.sampled_from([torch.float32, torch.int64]))
    )
    first = data.draw(st.integers(0, len(whole) - 1))
    second = data.draw(st.integers(0, len(whole) - 1).filter(lambda i: i != first))
    swapped = whole.clone()
    swapped[first], swapped[second] = whole[second], whole[first]
    assert tensor_digest(swapped, whole.shape) != tensor_digest(whole, whole.shape)


@given(rows=st.integers(2, 40), columns=st.sampled_from([1, 7, 64, 4096]), seed=st.integers(0, 1000))
def test_two_swapped_rows_change_it(rows: int, columns: int, seed: int) -> None:
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    swapped = whole.clone()
    swapped[0], swapped[rows - 1] = whole[rows - 1], whole[0]
    assert tensor_digest(swapped, whole.shape) != tensor_digest(whole, whole.shape)


def test_a_transposed_matrix_and_a_longer_row_of_zeros_differ() -> None:
    whole = torch.randn(8, 8)
    assert tensor_digest(whole.T, (8, 8)) != tensor_digest(whole, (8, 8))
    assert tensor_digest(torch.zeros(4), (4,)) != tensor_digest(torch.zeros(5), (5,))


def test_it_reads_what_is_there_also_through_strides() -> None:
    whole = torch.randn(6, 6)
    assert tensor_digest(whole.T.contiguous().T, (6, 6)) == tensor_digest(whole, (6, 6))
    assert tensor_digest(torch.tensor(3.0), ()) == tensor_digest(torch.tensor([3.0]), (1,))
