"""The digest kernel's work list, executed in numpy: the same sums as the CPU's digest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory.test_verify import cuts, tensors
from weightsync.errors import PlanError
from weightsync.memory.kernels.digest_factors import COLUMNS, column_factors, row_factors
from weightsync.memory.kernels.digest_tiles import TILE_NBYTES, DigestPart, digest_runs, digest_tiles
from weightsync.memory.kernels.digests import tensor_digest
from weightsync.plan import Box
from weightsync.plan.layout.layout import Int64

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def part_of(whole: torch.Tensor, box: Box, number: int = 0) -> DigestPart:
    """`box` of `whole` where it lies in memory, on either side of the bus."""
    itemsize = whole.element_size()
    return DigestPart(
        tensor=number,
        address=whole[box.slices()].data_ptr(),
        strides=tuple(stride * itemsize for stride in whole.stride()),
        box=box,
        shape=tuple(whole.shape),
        itemsize=itemsize,
    )


def execute(parts: list[DigestPart], whole: torch.Tensor, num_tensors: int) -> list[int]:
    memory = whole.view(torch.uint8).reshape(-1).numpy() if whole.numel() else np.empty(0, np.uint8)
    totals = np.zeros(num_tensors, np.uint64)
    for word_nbytes, runs in digest_runs(parts).items():
        add(totals, runs, word_nbytes, memory, whole.data_ptr())
    return totals.tolist()


def add(totals: np.ndarray, runs: Int64, word_nbytes: int, memory: np.ndarray, start: int) -> None:
    """Add digests of `runs` to `totals`. `memory` is uint8[n]; its first byte has the address `start`."""
    for shape, table in digest_tiles(runs).items():
        for address, index, rows, row_nbytes, pitch, index_pitch, tensor, _ in table.tolist():
            assert rows * row_nbytes <= TILE_NBYTES
            is_row = rows == 1 and not (address % 16 or index % 16 or row_nbytes % 16)
            assert is_row or shape == "words"
            for row in range(rows):
                at = address - start + row * pitch
                words = np.frombuffer(memory[at : at + row_nbytes].tobytes(), WORDS[word_nbytes])
                first = (index + row * index_pitch) // word_nbytes
                number = np.arange(first, first + len(words))
                factors = row_factors(number[-1] // COLUMNS + 1)[number // COLUMNS]
                factors = factors * column_factors(word_nbytes)[number % COLUMNS]
                products = factors * (words.astype(np.uint64) + np.uint64(1))
                totals[tensor : tensor + 1] += products.sum(dtype=np.uint64)


@given(st.data())
def test_the_work_list_says_what_the_digest_is(data: st.DataObject) -> None:
    whole = data.draw(tensors())
    boxes = data.draw(cuts(tuple(whole.shape)))
    parts = [part_of(whole, box, number) for number, box in enumerate(boxes)]
    expected = [tensor_digest(whole[box.slices()], whole.shape, box) for box in boxes]
    assert execute(parts, whole, len(boxes)) == expected
    times = 64 // len(parts) + 1  # so many are not looked at one by one
    assert execute(parts * times, whole, len(boxes)) == [times * each % 2**64 for each in expected]


@pytest.mark.parametrize(("columns", "shape"), [(TILE_NBYTES, "rows"), (TILE_NBYTES // 2, "words")])
def test_long_rows_of_whole_units_have_their_own_kernel(columns: int, shape: str) -> None:
    whole = torch.zeros(5, 2 * columns, dtype=torch.uint8)
    part = part_of(whole, Box((0, 0), (5, columns)))
    (run,) = digest_runs([replace(part, address=1 << 20)]).values()
    assert list(digest_tiles(run)) == [shape]


@pytest.mark.parametrize("at", [1, 4095, 4096, 4097, 8192])
def test_across_rows_and_tiles(at: int) -> None:
    whole = torch.randn(3, 40_001).to(torch.bfloat16)
    boxes = [Box((0, 0), (3, at)), Box((0, at), (3, 40_001 - at))]
    shares = execute([part_of(whole, box) for box in boxes], whole, 1)
    assert shares == [tensor_digest(whole, whole.shape)]


def test_no_parts_no_work_and_too_large_a_tensor() -> None:
    assert digest_runs([]) == {}
    empty = torch.empty(0, 3)
    assert digest_runs([part_of(empty, Box((0, 0), (0, 3)))]) == {}
    huge = DigestPart(tensor=3, address=0, strides=(1,), box=Box((0,), (1,)), shape=(1 << 37,), itemsize=1)
    with pytest.raises(PlanError, match="tensor 3"):
        digest_runs([huge])
