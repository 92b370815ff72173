"""Finds where an engine's own loader puts the elements of a LoRA adapter, by loading their coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weightsync.errors import ConfigError
from weightsync.memory.tensors import byte_strides
from weightsync.plan import Box, RankLayout, Segment, TensorMeta
from weightsync.protocol.adapters import AdapterSpec

_DIGITS = 256
"""All whole numbers to 256 are exact in bfloat16. Zero is for elements that are not the adapter's."""


def passes(spec: AdapterSpec) -> Iterator[tuple[int, int]]:
    """Yield what each load has to carry: a coordinate, and the place value of one of its digits.

    Coordinates are the number of the tensor (0), the row (1) and the column (2). A load carries one digit of
    one of them, so no float type need hold more.
    """
    most = len(spec.tensors), *(max(meta.shape[axis] for meta in spec.tensors) for axis in range(2))
    for axis, size in enumerate(most):
        base = 1
        while base == 1 or base < size:
            yield axis, base
            base *= _DIGITS


def digits(spec: AdapterSpec, axis: int, base: int, index: int) -> torch.Tensor:
    """Return what one load has in place of tensor `index`: float32, of its shape.

    These are digits of one coordinate of its elements, plus 1. See `passes`.
    """
    rows, columns = spec.tensors[index].shape
    counts = (torch.tensor([[index]]), torch.arange(rows)[:, None], torch.arange(columns)[None])
    return (counts[axis] // base % _DIGITS + 1).float().expand(rows, columns)


class _Region:
    """What one matrix of a slot has of one tensor: a box of it, if the engine keeps its order."""

    def __init__(self, numbers: torch.Tensor, number: int) -> None:
        """`numbers` has the tensors' numbers of a matrix's elements, and `number` that of the region."""
        mine = numbers == number
        rows, columns = mine.any(1).nonzero().flatten(), mine.any(0).nonzero().flatten()
        self.number, self.top, self.left = number, int(rows[0]), int(columns[0])
        self.extent = int(rows[-1]) + 1 - self.top, int(columns[-1]) + 1 - self.left
        self._in_order = bool(self._cut(mine).all())
        self._lines = [torch.zeros(size, dtype=torch.int32) for size in self.extent]

    def add(self, axis: int, base: int, digit: torch.Tensor) -> None:
        """Take in a digit of all elements' rows (axis 1) or columns (2), which are alike along the other."""
        cut = self._cut(digit)
        line = cut[:, :1] if axis == 1 else cut[:1]
        self._in_order &= bool((cut == line).all())
        self._lines[axis - 1] += line.flatten() * base

    def box(self) -> Box | None:
        """Return the box of the tensor that is there; None if elements are in another order."""
        first = [int(line[0]) for line in self._lines]
        for start, line in zip(first, self._lines, strict=True):
            self._in_order &= bool((line == torch.arange(start, start + len(line))).all())
        return Box(tuple(first), self.extent) if self._in_order else None

    def _cut(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.top : self.top + self.extent[0], self.left : self.left + self.extent[1]]


class AdapterPlaces:
    """What one rank's slot held after each load of coordinates, in the order of `passes`.

    Adapters of experts have many elements: only tensors' numbers are kept of each.
    """

    def __init__(self, spec: AdapterSpec) -> None:
        self._spec = spec
        self._numbers: dict[str, torch.Tensor] = {}
        self._regions: dict[str, list[_Region]] = {}
        self._live: Mapping[str, torch.Tensor] = {}

    def add(self, axis: int, base: int, live: Mapping[str, torch.Tensor]) -> None:
        """Take in the slot's matrices `live`, by name, after a load of `digits`."""
        self._live = live
        if axis == 0:
            for name, stack in live.items():
                self._numbers[name] = self._numbers.get(name, 0) + _digit(stack) * base
            return
        for name in [*self._numbers]:
            numbers = self._numbers.pop(name)
            self._regions[name] = [_Region(numbers, number) for number in _present(numbers)]
        for name, regions in self._regions.items():
            digit = _digit(live[name]) if regions else None
            for region in regions:
                assert digit is not None
                region.add(axis, base, digit)

    def layout(self) -> RankLayout:
        """Return which boxes of which tensors are where in the slot, once all loads were added.

        Raises ConfigError for a tensor of which the engine keeps more than one box, or changes the order.
        """
        segments = [
            self._segment(name, region) for name, regions in self._regions.items() for region in regions
        ]
        names = {segment.tensor for segment in segments}
        kind = str(next(iter(self._live.values())).dtype).removeprefix("torch.")
        metas = (meta for meta in self._spec.tensors if meta.name in names)
        return RankLayout(tuple(TensorMeta(meta.name, kind, meta.shape) for meta in metas), tuple(segments))

    def _segment(self, name: str, region: _Region) -> Segment:
        """Return which box a region of a matrix has, and where. Raises ConfigError if it is none."""
        meta, box = self._spec.tensors[region.number], region.box()
        if box is None:
            remedy = f"the engine rearranges {meta.name} in {name}: leave it out"
            raise ConfigError("adapter", self._spec.name, remedy)
        strides = byte_strides(self._live[name])
        offset = region.top * strides[0] + region.left * strides[1]
        return Segment(meta.name, box, name, offset, strides)


def _digit(stack: torch.Tensor) -> torch.Tensor:
    """Return what `digits` put into a matrix, int32; negative for elements that are not the adapter's."""
    return stack.cpu().int() - 1


def _present(numbers: torch.Tensor) -> list[int]:
    """Return which tensors a matrix has elements of. Others have negative numbers there."""
    counts = torch.bincount(numbers.flatten().clamp(min=-1) + 1)
    present: list[int] = counts[1:].nonzero().flatten().tolist()
    return present
