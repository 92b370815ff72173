"""Finds where an engine's own loader puts the elements of a LoRA adapter, by loading their coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from weightsync.errors import ConfigError
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.protocol.adapters import AdapterSpec

_DIGITS = 256
"""All whole numbers to 256 are exact in bfloat16. Zero is for elements that are not the adapter's."""
_STACK_DIMS = 3
_NONE = torch.iinfo(torch.int32).max
"""In place of a tensor's number, where no tensor is."""


def passes(spec: AdapterSpec) -> Iterator[tuple[int, int]]:
    """Yield for each load the coordinate to carry, and the place value of one digit.

    Coordinates are the number of the tensor (0), the row (1) and the column (2). A load carries one digit of
    one coordinate, so a float type need not store more.
    """
    most = len(spec.tensors), *(max(meta.shape[axis] for meta in spec.tensors) for axis in range(2))
    for axis, size in enumerate(most):
        base = 1
        while base == 1 or base < size:
            yield axis, base
            base *= _DIGITS


def digits(spec: AdapterSpec, axis: int, base: int) -> list[torch.Tensor]:
    """Return one load's replacement of each tensor: float32, of equal shape, see `passes`.

    The values are digits of one coordinate of the elements, plus 1. Tensors share memory: do not write it.
    """
    shapes = [meta.shape for meta in spec.tensors]
    size = len(shapes) if axis == 0 else max(shape[axis - 1] for shape in shapes)
    line = (torch.arange(size) // base % _DIGITS + 1).float()
    if axis == 0:
        return [
            digit.expand(shape) for digit, shape in zip(line.view(-1, 1, 1).unbind(), shapes, strict=True)
        ]
    along = line[:, None] if axis == 1 else line[None]
    filled = {shape: along[: shape[0], : shape[1]].expand(shape) for shape in {*shapes}}
    return [filled[shape] for shape in shapes]


class _Regions:
    """Regions of a stack's matrices, each a box of one tensor if the engine keeps the order of elements."""

    def __init__(self, matrices: torch.Tensor, numbers: torch.Tensor, mine: torch.Tensor) -> None:
        """
        Args:
            matrices: the number of each region's matrix, int64[regions].
            numbers: the number of each region's tensor, int32[regions].
            mine: the tensor's elements in the matrix, bool[regions, rows, columns].
        """
        self._matrices, self._numbers = matrices, numbers
        self._held = mine.any(2), mine.any(1)
        self._first = [held.byte().argmax(1) for held in self._held]
        self._extent = [_last(held) + 1 - first for held, first in zip(self._held, self._first, strict=True)]
        self._in_order = mine.sum((1, 2)) == self._extent[0] * self._extent[1]
        self._lines = [torch.zeros(held.shape, dtype=torch.int32) for held in self._held]

    def add(self, axis: int, base: int, digit: torch.Tensor) -> None:
        """Take in a digit of all elements' rows (axis 1) or columns (2), which are alike along the other.

        `digit` is of the whole stack.
        """
        cut = digit if len(self._matrices) == len(digit) else digit[self._matrices]
        across = 2 if axis == 1 else 1
        first = self._first[across - 1].view(-1, 1, 1)
        line = cut.take_along_dim(first, across)
        rows, columns = self._held
        others = ~(rows[:, :, None] & columns[:, None])
        self._in_order &= others.logical_or_(cut == line).all(2).all(1)
        self._lines[axis - 1] += line.squeeze(across) * base

    def boxes(self) -> Iterator[_Placed]:
        """Yield the place and the tensor's box of every region."""
        starts = []
        for held, first, line in zip(self._held, self._first, self._lines, strict=True):
            start = line.take_along_dim(first[:, None], 1)
            wanted = start - first[:, None] + torch.arange(line.shape[1])
            self._in_order &= ((line == wanted) | ~held).all(1)
            starts.append(start.flatten())
        columns = self._matrices, self._numbers, *self._first, *starts, *self._extent, self._in_order
        for matrix, number, top, left, row, column, height, width, in_order in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            box = Box((row, column), (height, width)) if in_order else None
            yield _Placed(matrix, number, top, left, box)


class _Placed(NamedTuple):
    """A part of tensor `number` in a matrix of a stack.

    The box begins at row `top` and column `left`. The box is None if elements are in another order.
    """

    matrix: int
    number: int
    top: int
    left: int
    box: Box | None


class AdapterPlaces:
    """The content of one rank's slot after each load of coordinates, in the order of `passes`.

    Adapters of experts have many elements: per element, only the tensor's number is stored.
    """

    def __init__(self, spec: AdapterSpec) -> None:
        self._spec = spec
        self._numbers: dict[str, torch.Tensor] = {}
        self._regions: dict[str, list[_Regions]] = {}
        self._live: Mapping[str, torch.Tensor] = {}

    def add(self, axis: int, base: int, live: Mapping[str, torch.Tensor]) -> None:
        """Add the content of the slot after a load of `digits`.

        `live` has the slot's matrices by name, [rows, columns], or stacks of them, [matrices, rows, columns].
        """
        self._live = live
        if axis == 0:
            for name, stack in live.items():
                self._numbers[name] = self._numbers.get(name, 0) + _digit(stack) * base
            return
        for name in [*self._numbers]:
            self._regions[name] = [*_regions(self._numbers.pop(name))]
        for name, regions in self._regions.items():
            digit = _digit(live[name]) if regions else None
            for each in regions:
                assert digit is not None
                each.add(axis, base, digit)

    def layout(self) -> RankLayout:
        """Return which boxes of which tensors are where in the slot, once all loads were added.

        Raises ConfigError for a tensor of which the engine keeps more than one box, or changes the order.
        """
        segments = [
            segment for name, regions in self._regions.items() for segment in self._segments(name, regions)
        ]
        names = {segment.tensor for segment in segments}
        kind = str(next(iter(self._live.values())).dtype).removeprefix("torch.")
        metas = (meta for meta in self._spec.tensors if meta.name in names)
        return RankLayout(tuple(TensorMeta(meta.name, kind, meta.shape) for meta in metas), tuple(segments))

    def _segments(self, name: str, regions: Sequence[_Regions]) -> Iterator[Segment]:
        """Yield which boxes a stack has, and where. Raises ConfigError for a region that is none."""
        live, metas = self._live[name], self._spec.tensors
        step, *strides = byte_strides(live) if live.dim() == _STACK_DIMS else (0, *byte_strides(live))
        placed = sorted((each for part in regions for each in part.boxes()), key=lambda each: each.matrix)
        for matrix, number, top, left, box in placed:
            meta = metas[number]
            if box is None:
                where = f"{name}.{matrix}" if live.dim() == _STACK_DIMS else name
                remedy = f"the engine rearranges {meta.name} in {where}: leave it out"
                raise ConfigError("adapter", self._spec.name, remedy)
            offset = matrix * step + top * strides[0] + left * strides[1]
            yield Segment(meta.name, box, name, offset, tuple(strides))


def _digit(stack: torch.Tensor) -> torch.Tensor:
    """Return the digits that `digits` put into matrices, int32[matrices, rows, columns].

    Elements outside the adapter are negative.
    """
    digit = stack.cpu().int() - 1
    return digit if digit.dim() == _STACK_DIMS else digit[None]


def _regions(numbers: torch.Tensor) -> Iterator[_Regions]:
    """Yield the regions of a stack, by the tensors' numbers of all elements: one of each matrix at a time.

    Other elements than the adapter's have negative numbers.
    """
    numbers = torch.where(numbers < 0, _NONE, numbers)
    left = int((numbers != _NONE).sum())
    while left:
        least = numbers.amin((1, 2))
        matrices = (least != _NONE).nonzero().flatten()
        mine = numbers[matrices] == least[matrices, None, None]
        yield _Regions(matrices, least[matrices], mine)
        left -= int(mine.sum())
        if left:
            numbers.masked_fill_(numbers == least[:, None, None], _NONE)


def _last(held: torch.Tensor) -> torch.Tensor:
    """Return the last column that is true in each row."""
    return held.shape[1] - 1 - held.flip(1).byte().argmax(1)
