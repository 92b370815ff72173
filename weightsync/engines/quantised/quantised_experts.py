"""Experts that an engine quantised to FP8 as it started: a scale for all of an expert in a stack.

One stack has the gate and up projections of each expert, one below the other, with one scale for both. The
other has the down projections. SGLang and vLLM have them alike.

Sources: SGLang's ``layers/quantization/fp8.py`` of 0.5.17, and vLLM's of 0.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.loading.traced_rows import block_number, is_whole_rows
from weightsync.plan import Box, Segment
from weightsync.plan.layout.formats import Format

STACKS = ("w13_weight", "w2_weight")
"""The parameters of all experts that a rank has: [experts, rows, columns]. Scales add ``_scale``."""


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert in a stack, before it was quantised.

    Attributes:
        stack: the name of the stack.
        number: the expert's number on its rank.
        rows, columns: of the expert in the stack.
        itemsize: bytes of an element before quantising.
        whole: the format of an expert that one rank keeps whole.
    """

    stack: str
    number: int
    rows: int
    columns: int
    itemsize: int
    whole: Format

    @classmethod
    def at(cls, segment: Segment, stack: torch.Tensor, dtype: torch.dtype, whole: Format) -> Expert:
        """Return the expert in which a segment is. Raises UnprovableError if it is not whole rows of it.

        Args:
            stack: of the shape in which the loader fills it, with elements of `dtype`.
            whole: see `Expert`.
        """
        _, rows, columns = stack.shape
        pitch = columns * dtype.itemsize
        number, start = divmod(segment.byte_offset, rows * pitch)
        fits = is_whole_rows(segment, columns, dtype.itemsize)
        if not fits or start // pitch + segment.box.extent[0] > rows:
            raise UnprovableError(f"{segment.buffer} has rows that are not those of {segment.tensor}")
        return cls(segment.buffer, number, rows, columns, dtype.itemsize, whole)

    def formats(
        self, its: Sequence[Segment], shapes: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[Segment, Format]]:
        """Yield `its` segments with the format of their tensor. All have one scale.

        Raises UnprovableError if segments are not alike, or if ranks keep unequal parts of the expert.
        """
        names = [segment.tensor for segment in sorted(its, key=lambda each: each.byte_offset)]
        paths = [name.removesuffix(".weight").rpartition(".") for name in names]
        kinds = {(parent, shapes[name]) for name, (parent, _, _) in zip(names, paths, strict=True)}
        leaves = tuple(leaf for _, _, leaf in paths)
        are_alike = len(kinds) == 1 and len({each.box for each in its}) == 1
        are_weights = all(name.endswith(".weight") for name in names)
        if not (are_alike and are_weights and len({*leaves}) == len(leaves)):
            raise UnprovableError(f"{self.stack} has one scale for parts of {' and '.join(names)}")
        box, shape = its[0].box, shapes[names[0]]
        block = [0 if part == whole else part for part, whole in zip(box.extent, shape, strict=True)]
        for part, whole, first in zip(box.extent, shape, box.offset, strict=True):
            if whole % part or first % part:
                raise UnprovableError(f"{self.stack}: ranks keep unequal parts of {names[0]}")
        together = leaves if len(leaves) > 1 else ()
        form = replace(self.whole, block=(block[0], block[1]), together=together)
        for segment in its:
            yield segment, form

    def places(self, segment: Segment, form: Format) -> Iterator[Segment]:
        """Yield where the values and the scale of a segment live."""
        start = segment.byte_offset // self.itemsize
        yield Segment(segment.tensor, segment.box, self.stack, start, (self.columns, 1))
        name = segment.tensor.removesuffix("weight") + form.scale_suffix
        box = Box.whole((1,)) if form.block == (0, 0) else Box(block_number(segment.box), (1, 1))
        yield Segment(name, box, f"{self.stack}_scale", 4 * self.number, (4,) * box.ndim)
