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


class AdapterPlaces:
    """What one rank's slot held after each load of coordinates."""

    def __init__(self, spec: AdapterSpec) -> None:
        self._spec = spec
        self._found: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        self._live: Mapping[str, torch.Tensor] = {}

    def add(self, axis: int, base: int, live: Mapping[str, torch.Tensor]) -> None:
        """Take in the slot's matrices `live`, by name, after a load of `digits`."""
        found, self._live = self._found[axis], live
        for name, stack in live.items():
            found[name] = found.get(name, 0) + (stack.cpu().int() - 1) * base

    def layout(self) -> RankLayout:
        """Return which boxes of which tensors are where in the slot, once all loads were added.

        Raises ConfigError for a tensor of which the engine keeps more than one box, or changes the order.
        """
        segments = [
            self._segment(name, number, stack)
            for name, stack in self._live.items()
            for number in self._numbers(name)
        ]
        names = {segment.tensor for segment in segments}
        kind = str(next(iter(self._live.values())).dtype).removeprefix("torch.")
        metas = (meta for meta in self._spec.tensors if meta.name in names)
        return RankLayout(tuple(TensorMeta(meta.name, kind, meta.shape) for meta in metas), tuple(segments))

    def _numbers(self, name: str) -> list[int]:
        """Return which tensors a matrix has elements of. Others have negative numbers there."""
        counts = torch.bincount(self._found[0][name].flatten().clamp(min=-1) + 1)
        numbers: list[int] = counts[1:].nonzero().flatten().tolist()
        return numbers

    def _segment(self, name: str, number: int, live: torch.Tensor) -> Segment:
        """Return which box of tensor `number` a matrix has, and where.

        Raises ConfigError if it is not one box in order.
        """
        found, meta = [each[name] for each in self._found], self._spec.tensors[number]
        rows, columns = torch.nonzero(found[0] == number, as_tuple=True)
        top, left = int(rows.min()), int(columns.min())
        extent = int(rows.max()) + 1 - top, int(columns.max()) + 1 - left
        held = [each[top : top + extent[0], left : left + extent[1]] for each in found]
        _, row, column = (int(each[0, 0]) for each in held)
        counted = torch.arange(extent[0])[:, None], torch.arange(extent[1])[None]
        expected = torch.tensor(number), row + counted[0], column + counted[1]
        if not all(bool((each == wanted).all()) for each, wanted in zip(held, expected, strict=True)):
            remedy = f"the engine rearranges {meta.name} in {name}: leave it out"
            raise ConfigError("adapter", self._spec.name, remedy)
        strides = byte_strides(live)
        offset = top * strides[0] + left * strides[1]
        return Segment(meta.name, Box((row, column), extent), name, offset, strides)
