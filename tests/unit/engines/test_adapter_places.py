"""An adapter's places are those where an engine's loader put its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.engines.lora.adapter_places import AdapterPlaces, digits, passes
from weightsync.errors import ConfigError
from weightsync.memory.tensors import segment_view
from weightsync.plan import Box, RankLayout, TensorMeta
from weightsync.protocol.adapters import AdapterSpec

Loader = Callable[[Sequence[torch.Tensor]], Mapping[str, torch.Tensor]]
ROWS, COLUMNS = 7, 9


@dataclass(frozen=True)
class Part:
    """A box of tensor `number` at `row` and `column` of a matrix."""

    matrix: int
    number: int
    box: Box
    row: int
    column: int


def spec_of(shapes: Sequence[tuple[int, int]]) -> AdapterSpec:
    return AdapterSpec.of("math", [TensorMeta(f"t{i}", "float32", shape) for i, shape in enumerate(shapes)])


def found(spec: AdapterSpec, load: Loader) -> RankLayout:
    places = AdapterPlaces(spec)
    for axis, base in passes(spec):
        places.add(axis, base, load(digits(spec, axis, base)))
    return places.layout()


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[Part]]:
    """Draw how many matrices a stack has, shapes of tensors, and a part of each, one below the other."""
    count = draw(st.integers(1, 4))
    heights = [draw(st.lists(st.integers(1, 3), max_size=2)) for _ in range(count)]
    order = draw(st.permutations(range(sum(map(len, heights)) + 1)))
    shapes, held = {order[-1]: (1, 1)}, []
    for matrix, its in enumerate(heights):
        row = draw(st.integers(0, ROWS - sum(its)))
        for height in its:
            width = draw(st.integers(1, COLUMNS))
            top, left = draw(st.integers(0, 300)), draw(st.integers(0, 300))
            number, column = order[len(held)], draw(st.integers(0, COLUMNS - width))
            held.append(Part(matrix, number, Box((top, left), (height, width)), row, column))
            shapes[number] = (top + height + draw(st.integers(0, 2)), left + width)
            row += height
    return count, [shapes[number] for number in range(len(shapes))], held


@given(parts(), st.booleans(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_each_box_is_where_the_loader_put_it(
    drawn: tuple[int, list[tuple[int, int]], list[Part]], is_stack: bool, dtype: torch.dtype
) -> None:
    count, shapes, held = drawn

    def load(values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        stack = torch.zeros(2, count, ROWS, COLUMNS + 2, dtype=dtype)[1, :, :, 1:-1]  # with gaps
        for part in held:
            height, width = part.box.extent
            its = stack[part.matrix, part.row : part.row + height, part.column : part.column + width]
            its.copy_(values[part.number][part.box.slices()])
        return {"s": stack} if is_stack else {f"s.{i}": matrix for i, matrix in enumerate(stack)}

    spec = spec_of(shapes)
    layout = found(spec, load)
    wanted = sorted((part.matrix, part.number, part.box) for part in held)
    assert [(int(each.tensor[1:]), each.box) for each in layout.segments] == [each[1:] for each in wanted]
    assert [meta.name for meta in layout.tensors] == [f"t{i}" for i in sorted(part.number for part in held)]
    assert {meta.dtype for meta in layout.tensors} <= {str(dtype).removeprefix("torch.")}
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    live = load(weights)
    for segment in layout.segments:
        expected = weights[int(segment.tensor[1:])][segment.box.slices()]
        assert torch.equal(segment_view(live[segment.buffer], segment), expected)


def test_more_tensors_than_a_digit_counts_have_their_places() -> None:
    count = 700
    layout = found(spec_of([(1, 1)] * count), lambda values: {"s": torch.stack([*values]).bfloat16()})
    assert [segment.tensor for segment in layout.segments] == [f"t{i}" for i in range(count)]
    assert [segment.byte_offset for segment in layout.segments] == [*range(0, 2 * count, 2)]


@pytest.mark.parametrize("is_stack", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.flip(0),
        lambda each: each.flip(1),
        lambda each: each[[0, 2, 1]],
        lambda each: each[:, [0, 1, 1]],
        lambda each: each.T,
        lambda each: each * (1 - torch.eye(3)),
        lambda each: torch.cat([each[:, :2], each[[0, 2, 1], 2:]], 1),
        lambda each: torch.cat([each[:2], each[2:, [0, 2, 1]]]),
    ],
)
def test_a_rearranged_tensor_is_named(change: Callable[[torch.Tensor], torch.Tensor], is_stack: bool) -> None:
    def load(values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        stack = torch.stack([values[0], change(values[1])])
        return {"s": stack} if is_stack else {"s.0": stack[0], "s.1": stack[1]}

    with pytest.raises(ConfigError, match=r"the engine rearranges t1 in s\.1: leave it out"):
        found(spec_of([(3, 3), (3, 3)]), load)


def test_a_tensor_with_a_gap_that_another_fills_is_named() -> None:
    """The other's coordinates are those that the gap would have."""

    def load(values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        first, second = values
        return {"s": torch.cat([first[:, :1], second[:, 1:2], first[:, 2:]], 1)}

    with pytest.raises(ConfigError, match=r"the engine rearranges t0 in s: leave it out"):
        found(spec_of([(3, 3), (3, 3)]), load)
