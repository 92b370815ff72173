"""The least reads of a rank with quantised weights, from full-precision tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.errors import PlanError
from weightsync.plan.layout.experts import expert_parts
from weightsync.plan.layout.formats import TOGETHER, Format
from weightsync.plan.layout.layout import Bool, Int64
from weightsync.plan.layout.segment import Box, RankLayout, Segment, TensorMeta

MOST_NUMEL = 1 << 25
"""Elements of one read, if a block has no more. Then little memory is needed to gather it in."""


def cuts_block(first: Int64, end: Int64, whole: Int64, block: Int64) -> Bool:
    """Return which boxes keep a part of a block: the last of a matrix may be smaller.

    Args:
        first, end: [..., 2], the boxes' first row and column, and the ends.
        whole, block: [..., 2], rows and columns of the boxes' matrix, and of a block.
    """
    cut: Bool = ((first % block != 0) | ((end % block != 0) & (end != whole))).any(axis=-1)
    return cut


@dataclass(frozen=True, slots=True)
class StoredRead:
    """A box of a tensor that a rank reads, and the place of the stored result.

    Attributes:
        tensor: the number of the tensor.
        box: the part of the tensor that is read.
        name: the name of the stored result: the tensor's name, or the name of an expert in the tensor.
        stored: `box` within the tensor or expert of that name.
        place: where the rank stores the read bytes or, with a format, the values.
        form: the format of the result; None if the bytes are stored unchanged.
        scales: where the rank stores scales.

    Every read of a rule in `TOGETHER` is one block. Reads with equal `shares` are quantised together.
    """

    tensor: int
    box: Box
    name: str
    stored: Box
    place: Segment
    form: Format | None = None
    scales: Segment | None = None

    @property
    def shares(self) -> tuple[str, int] | None:
        """The parameter and offset of the scale that it may share with others. None if it shares none."""
        if self.form and self.scales and self.form.rule in TOGETHER:
            return self.scales.buffer, self.scales.byte_offset
        return None

    def segment(self, number: int, meta: TensorMeta) -> Segment:
        """Return the target of the read: the place, or an own buffer to quantise from."""
        if self.form:
            return Segment(meta.name, self.box, gathered(number), 0, self.box.strides(meta.itemsize))
        outer = self.box.strides(meta.itemsize)[: self.box.ndim - self.stored.ndim]
        strides = (*outer, *self.place.strides)
        return Segment(meta.name, self.box, self.place.buffer, self.place.byte_offset, strides)


def gathered(number: int) -> str:
    """Return the name of the buffer in which read `number` is put together."""
    return f"read {number}"


def reads_layout(
    tensors: Sequence[TensorMeta], tied: Sequence[tuple[str, str]], reads: Sequence[StoredRead]
) -> RankLayout:
    """Return the layout of a rank that takes just `reads` of `tensors`."""
    segments = (each.segment(number, tensors[each.tensor]) for number, each in enumerate(reads))
    return RankLayout(tuple(tensors), tuple(segments), tuple(tied))


def stored_reads(
    tensors: Sequence[TensorMeta],
    stored: RankLayout,
    dtypes: Mapping[str, str],
    formats: Mapping[str, Format],
) -> tuple[StoredRead, ...]:
    """Return a rank's reads of `tensors`. Blocks that share a scale are read whole.

    Args:
        stored: the tensors of the rank's quantised checkpoint, and their places in live parameters.
        dtypes: the dtypes of these parameters, by name.
        formats: the formats of weights to quantise, by the weight's name.

    Raises:
        PlanError: names a tensor that has to be read whole: the rank keeps a part of a block, or not all
            matrices that share a scale, or the stored result is not one separate piece of memory.
    """
    shapes = {meta.name: meta.shape for meta in tensors}
    places = _Places(stored, dtypes)
    found: list[StoredRead] = []
    for number, meta in enumerate(tensors):
        for name, part in expert_parts(meta.name, meta.shape, shapes):
            form = formats.get(name)
            if form:
                found += places.quantised(number, part, name, form)
            else:
                found += places.as_it_comes(number, part, name, meta.dtype)
    if missing := sorted({meta.name for meta in stored.tensors} - places.asked):
        raise PlanError(missing[0], "it is made of no tensor of the plan")
    _require_sharing(found)
    return tuple(found)


def _require_sharing(reads: Sequence[StoredRead]) -> None:
    """Raise PlanError if a scale belongs to other matrices than the formats say."""
    sharing = defaultdict[tuple[str, int], dict[str, Format]](dict)
    for each in reads:
        if each.shares and each.form:
            sharing[each.shares][each.name] = each.form
    for place, forms in sharing.items():
        for name, form in forms.items():
            if {*form.sharing(name)} != {*forms}:
                raise PlanError(name, f"{place[0]} has its scale with {' and '.join(forms)}: {form}")


class _Places:
    """The places of stored tensors, by name.

    Attributes:
        asked: the names that were asked for.
    """

    def __init__(self, stored: RankLayout, dtypes: Mapping[str, str]) -> None:
        self._held: defaultdict[str, list[Segment]] = defaultdict(list)
        for segment in stored.segments:
            self._held[segment.tensor].append(segment)
        self._dtypes = dtypes
        self.asked: set[str] = set()

    def as_it_comes(self, tensor: int, part: Box, name: str, dtype: str) -> Iterator[StoredRead]:
        """Yield the reads of a tensor, or of an expert at `part` of it, that is not quantised."""
        self.asked.add(name)
        for place in self._held[name]:
            self._require(name, place, dtype)
            if place.box.numel:
                yield StoredRead(tensor, _moved(place.box, part), name, place.box, place)

    def quantised(self, tensor: int, part: Box, name: str, form: Format) -> Iterator[StoredRead]:
        """Yield the reads of a matrix at `part` of a tensor, as whole rows of blocks."""
        scales_name = name.removesuffix("weight") + form.scale_suffix
        self.asked |= {name, scales_name}
        held = self._held[name], self._held[scales_name]
        if not any(held):
            return
        is_shared = form.rule in TOGETHER
        if [*map(len, held)] != [1, 1] or form.packed or not (form.block[0] or is_shared):
            raise PlanError(name, f"a rank cannot read a part of what becomes {form}")
        (place,), (scales,) = held
        box, whole = place.box, part.extent[-2:]
        block = tuple(given or size for given, size in zip(form.block, whole, strict=True))
        first = tuple(at // size for at, size in zip(box.offset, block, strict=True))
        is_cut = cuts_block(*np.array([box.offset, box.end, whole, block], np.int64))
        of_scales = Box.whole((1,)) if form.block == (0, 0) else Box(first, form.grid(box.extent))
        if is_cut or scales.box != of_scales or (is_shared and of_scales.numel != 1):
            raise PlanError(name, f"a rank keeps a part of a block, so it reads all: {form}")
        for each, dtype in ((place, form.values), (scales, "float32")):
            self._require(name, each, dtype)
            if not _is_dense(each, 4 if each is scales else 1):
                raise PlanError(name, "what is stored of it lies between others")
        num_rows = max(1, MOST_NUMEL // box.extent[1] // block[0]) * block[0]
        for row in range(box.offset[0], box.end[0], num_rows):
            own = Box((row, box.offset[1]), (min(num_rows, box.end[0] - row), box.extent[1]))
            yield StoredRead(tensor, _moved(own, part), name, own, place, form, scales)

    def _require(self, name: str, place: Segment, dtype: str) -> None:
        if (held := self._dtypes[place.buffer]) != dtype:
            raise PlanError(name, f"it is kept as {held}, not as {dtype}")


def _is_dense(place: Segment, itemsize: int) -> bool:
    """Return True if the rows of a place follow each other without gaps.

    The stride of a single element is ignored.
    """
    wanted = zip(place.box.extent, place.strides, place.box.strides(itemsize), strict=True)
    return all(size == 1 or stride == dense for size, stride, dense in wanted)


def _moved(box: Box, part: Box) -> Box:
    """Return a box of the part at `part` of a tensor as a box of the tensor."""
    outer = part.ndim - box.ndim
    offset = (own + at for own, at in zip(box.offset, part.offset[outer:], strict=True))
    return Box((*part.offset[:outer], *offset), (*part.extent[:outer], *box.extent))
