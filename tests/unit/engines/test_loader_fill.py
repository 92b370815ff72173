"""What a loader wrote is counted on the meta device, where addresses say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engines.loading.load_witness import has_pattern
from weightsync.engines.loading.loader_fill import FillCount, ToFill


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def counting(
    tensors: dict[str, ToFill],
    is_kept: bool = True,
    memories: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> FillCount:
    return FillCount(tensors, lambda _: is_kept, memories.get)


def test_what_nobody_wrote_is_named() -> None:
    weight, scale = meta(4, 3), meta(4, 1)
    count = counting({"qkv.weight": ToFill(weight, 12), "qkv.weight_scale": ToFill(scale, 4)})
    with count:
        weight.data[:2].copy_(torch.ones(2, 3))
        weight.data[2:].copy_(torch.ones(2, 3))
    assert count.missing() == ["qkv.weight_scale"]


def test_a_part_that_came_twice_does_not_stand_for_another() -> None:
    weight = meta(4, 3)
    count = counting({"qkv.weight": ToFill(weight, 12)})
    with count:
        for _ in range(2):
            weight.data.narrow(0, 0, 2).copy_(torch.ones(2, 3))
    assert count.missing() == ["qkv.weight (6 of 12 elements came)"]


@pytest.mark.parametrize("numel", [12, 9])
def test_padding_that_is_declared_or_filled_is_not_missed(numel: int) -> None:
    weight = meta(4, 3)
    count = counting({"embed.weight": ToFill(weight, numel)})
    with count:
        weight[:3].copy_(torch.ones(3, 3))
        if numel == 12:
            weight[3:].data.fill_(0)
    assert count.missing() == []


def test_a_buffer_is_needed_once_a_tensor_of_its_name_came() -> None:
    count = counting({"norm.mean": ToFill(meta(2), 2, needed=False)})
    assert count.missing() == []
    assert count.missing(["norm.mean"]) == ["norm.mean"]


def test_writes_elsewhere_and_reads_do_not_count() -> None:
    weight, other = meta(4), torch.zeros(4)
    count = counting({"weight": ToFill(weight, 4)})
    with count:
        other.copy_(torch.ones(4))
        other.add_(1)
        torch.add(weight, weight)
    weight.copy_(torch.ones(4))
    assert count.missing() == ["weight"]


def test_a_write_that_the_engine_does_not_keep_is_led_to_memory() -> None:
    weight, memory = meta(4, 3), torch.zeros(4, 3)
    count = counting(
        {"experts.weight": ToFill(weight, 12)}, is_kept=False, memories={"experts.weight": memory}
    )
    with count:
        weight.data[1:].t().copy_(torch.ones(3, 3))
        memory[0].copy_(torch.ones(3))  # the loader's next batch finds it in the module
    assert count.missing() == []
    assert count.writes_directly
    assert count.take_direct() == {"experts.weight": 12}
    assert memory.equal(torch.ones(4, 3))


def test_a_write_without_memory_is_named_even_if_all_elements_came() -> None:
    weight = meta(2)
    count = counting({"sinks": ToFill(weight, 2)}, is_kept=False)
    with count:
        weight.data.copy_(torch.ones(2))
    assert count.missing() == ["sinks (written where it reaches no memory)"]


def test_a_copy_that_repeats_elements_does_not_count_them() -> None:
    weight = meta(4, 3)
    count = counting({"weight": ToFill(weight, 12)})
    with count:
        weight.data.copy_(torch.ones(4, 1))
    assert count.missing() == ["weight (4 of 12 elements came)"]


def test_new_memory_has_the_pattern_until_it_is_written() -> None:
    with counting({}):
        made = torch.empty_strided((4,), (1,))
        made[:3] = 1
    assert has_pattern(made)
    made[3] = 1
    assert not has_pattern(made)


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_it_is_whole_once_each_row_came(rows: int, came: set[int]) -> None:
    weight = meta(rows, 2)
    count = counting({"weight": ToFill(weight, 2 * rows)})
    with count:
        for row in came:
            if row < rows:
                weight.data[row].copy_(torch.ones(2))
    assert bool(count.missing()) == (not came.issuperset(range(rows)))
