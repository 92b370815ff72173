"""The places of matrices that an engine quantises to FP8 itself, of full-precision weights, and their proof.

A stack ``w13_weight`` has the gate and up projections of each expert, one below the other, with one scale for
both. A stack ``w2_weight`` has the down projections. SGLang and vLLM have them alike.

Sources: SGLang's ``layers/quantization/fp8.py`` of 0.5.17, and vLLM's of 0.24.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from weightsync.engines.loading.checkpoint import Checkpoint
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.engines.quantised.quantizing_loader import stored_tensors
from weightsync.engines.quantised.stored_checkpoint import StoredCheckpoint
from weightsync.plan import Box, Segment
from weightsync.plan.layout.formats import Format
from weightsync.quantising.stored_places import StoredPlaces

STACKS = ("w13_weight", "w2_weight")
"""The parameters of all experts that a rank has: [experts, rows, columns]. Scales add ``_scale``."""

_Formats = Iterator[tuple[Segment, Format]]


class Quantises(Hashable, Protocol):
    """A matrix before the engine quantised it."""

    def formats(self, its: Sequence[Segment], shapes: Mapping[str, Sequence[int]]) -> _Formats:
        """Yield the matrix's segments with the formats of their tensors. Raises UnprovableError."""

    def places(self, segment: Segment, form: Format) -> Iterator[Segment]:
        """Yield where the values and the scales of a segment live."""


def online_places(
    segments: Sequence[Segment],
    checkpoint: Checkpoint,
    live: Mapping[str, torch.Tensor],
    owner_of: Callable[[Segment], Quantises | None],
) -> tuple[StoredCheckpoint, StoredPlaces]:
    """Return the tensors of a checkpoint as an engine quantises them, and their places in `live`.

    Args:
        segments: the places of full-precision tensors in the matrices before quantising.
        owner_of: returns the matrix of a segment. None if the segment is not quantised.

    Raises UnprovableError if a tensor is not whole rows of matrices, or has several formats.
    """
    shapes = {meta.name: meta.shape for meta in stored_tensors(checkpoint, {})}
    found, formats = list[Segment](), dict[str, Format]()
    owned = defaultdict[Quantises, list[Segment]](list)
    for segment in segments:
        owner = owner_of(segment)
        (found if owner is None else owned[owner]).append(segment)
    for owner, its in owned.items():
        for segment, form in owner.formats(its, shapes):
            if formats.setdefault(segment.tensor, form) != form:
                raise UnprovableError(f"{segment.tensor} is cut in two ways")
            found.extend(owner.places(segment, form))
    made = StoredCheckpoint(formats, stored_tensors(checkpoint, formats))
    return made, StoredPlaces(found, live, made.tensors, formats)


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A linear layer, or one expert in a stack, before it was quantised with one scale.

    Attributes:
        buffer: the name of the parameter.
        number: the expert's number on its rank; 0 for a linear layer.
        columns: the matrix's columns.
        itemsize: bytes of an element before quantising.
        whole: the format of a matrix that one rank keeps whole.
    """

    buffer: str
    number: int
    columns: int
    itemsize: int
    whole: Format

    @classmethod
    def at(cls, segment: Segment, loaded: torch.Tensor, dtype: torch.dtype, whole: Format) -> ScaledMatrix:
        """Return the matrix in which a segment is. Raises UnprovableError if it is not whole rows of it.

        Args:
            loaded: of the shape in which the loader fills the parameter, with elements of `dtype`.
            whole: see `ScaledMatrix`.
        """
        *_, rows, columns = loaded.shape
        pitch = columns * dtype.itemsize
        number, start = divmod(segment.byte_offset, rows * pitch)
        fits = is_whole_rows(segment, columns, dtype.itemsize)
        if not fits or start // pitch + segment.box.extent[0] > rows:
            raise UnprovableError(f"{segment.buffer} has rows that are not those of {segment.tensor}")
        return cls(segment.buffer, number, columns, dtype.itemsize, whole)

    def formats(self, its: Sequence[Segment], shapes: Mapping[str, Sequence[int]]) -> _Formats:
        """Yield `its` segments with the format of their tensor. All have one scale.

        Raises UnprovableError if segments are not alike, or if ranks keep unequal parts of the matrix.
        """
        its = sorted(its, key=lambda each: each.byte_offset)
        names = [segment.tensor for segment in its]
        paths = [name.removesuffix(".weight").rpartition(".") for name in names]
        leaves = tuple(leaf for _, _, leaf in paths)
        are_alike = all(name.endswith(".weight") for name in names) and len({*names}) == len(names)
        are_cut_alike = not self.buffer.endswith(STACKS) or len({each.box for each in its}) == 1
        if not (are_alike and are_cut_alike and len({parent for parent, _, _ in paths}) == 1):
            raise UnprovableError(f"{self._path} has one scale for parts of {' and '.join(names)}")
        blocks = [_block(segment.box, shapes[segment.tensor]) for segment in its]
        if None in blocks or len({block[1:] for block in blocks if block}) > 1:
            raise UnprovableError(f"{self._path}: ranks keep unequal parts of {' and '.join(names)}")
        together = leaves if len(leaves) > 1 else ()
        for segment, block in zip(its, blocks, strict=True):
            assert block
            yield segment, replace(self.whole, block=block[0], together=together)

    @property
    def _path(self) -> str:
        return self.buffer.removesuffix(".weight")

    def places(self, segment: Segment, form: Format) -> Iterator[Segment]:
        """Yield where the values and the scale of a segment live."""
        start = segment.byte_offset // self.itemsize
        yield Segment(segment.tensor, segment.box, self.buffer, start, (self.columns, 1))
        name = segment.tensor.removesuffix("weight") + form.scale_suffix
        box = Box.whole((1,)) if form.block == (0, 0) else Box(_block_number(segment.box), (1, 1))
        yield Segment(name, box, f"{self.buffer}_scale", 4 * self.number, (4,) * box.ndim)


def _block(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]] | None:
    """Return a rank's block of a tensor, the block's number along each axis, and the number of blocks.

    Returns None if the tensor does not consist of such blocks.
    """
    parts = [*zip(shape, box.extent, box.offset, strict=True)]
    if any(size % part or at % part for size, part, at in parts):
        return None
    rows, columns = (0 if part == size else part for size, part, _ in parts)
    return (rows, columns), _block_number(box), tuple(size // part for size, part, _ in parts)


def is_whole_rows(segment: Segment, columns: int, itemsize: int) -> bool:
    """Return True if a segment is whole rows of a matrix, or of matrices in a stack, without gaps."""
    box, pitch = segment.box, columns * itemsize
    steps = zip(box.extent, segment.strides, (pitch, itemsize), strict=False)
    is_rows = box.ndim == 2 and all(size == 1 or stride == step for size, stride, step in steps)
    return is_rows and box.extent[1] == columns and segment.byte_offset % pitch == 0


def _block_number(box: Box) -> tuple[int, ...]:
    """Return the number of a block along each axis, where all blocks are as large as it."""
    return tuple(at // size for at, size in zip(box.offset, box.extent, strict=True))


def random_matrix(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a random matrix, with rows of different sizes."""
    draw = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(rows, columns, generator=draw, device=device, dtype=dtype)
    return matrix.mul_(torch.logspace(-4, 1, rows, device=device).to(dtype).unsqueeze(1))


def are_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if both have the same dtype, shape and bits."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (found, wanted)))
