"""The layout of one rank: boxes of tensors, and their places in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from heapq import nlargest
from itertools import takewhile
from types import MappingProxyType

from weightsync.errors import PlanError, nearest
from weightsync.plan.layout.arrangement import Arrangement
from weightsync.plan.layout.draft import Draft


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offset: index of the first element, per dimension.
        extent: number of elements, per dimension. A box of 0 dimensions holds one element.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __reduce__(self) -> tuple[type[Box], tuple[tuple[int, ...], tuple[int, ...]]]:
        return Box, (self.offset, self.extent)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return all of a tensor of `shape`."""
        extent = tuple(shape)
        return cls((0,) * len(extent), extent)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.extent)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element, per dimension."""
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    def strides(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes from one element to the next, per dimension, if the box is contiguous."""
        return tuple(itemsize * math.prod(self.extent[axis + 1 :]) for axis in range(self.ndim))

    def distance(self, part: Box, strides: Sequence[int]) -> int:
        """Return the bytes from the first element of the box to the first element of `part`."""
        steps = zip(part.offset, self.offset, strides, strict=True)
        return sum((at - origin) * stride for at, origin, stride in steps)

    def intersect(self, other: Box) -> Box | None:
        """Return the elements that are in both, or None if there are none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        extent = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, extent) if all(e > 0 for e in extent) else None

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box; True if `other` is empty."""
        return other.numel == 0 or self.intersect(other) == other

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Return the indices of this box in an array that holds `origin`, by default the whole tensor."""
        base = origin.offset if origin else (0,) * self.ndim
        return tuple(slice(o - b, o - b + e) for o, b, e in zip(self.offset, base, self.extent, strict=True))

    def split(self, max_numel: int) -> Iterator[Box]:
        """Cut the box into parts of at most `max_numel` elements, in row-major order.

        Each part is a run of rows of one dimension, so it is contiguous if the box is.
        """
        assert max_numel > 0
        if self.numel == 0:
            return
        if self.numel <= max_numel:
            yield self
            return
        axis = self.ndim - 1
        while math.prod(self.extent[axis:]) <= max_numel:
            axis -= 1
        rows = max_numel // math.prod(self.extent[axis + 1 :])
        ones, tail = (1,) * axis, slice(axis + 1, None)
        leading = (range(o, o + e) for o, e in zip(self.offset[:axis], self.extent[:axis], strict=True))
        first, last = self.offset[axis], self.end[axis]
        for outer in itertools.product(*leading):
            for row in range(first, last, rows):
                extent = (*ones, min(rows, last - row), *self.extent[tail])
                yield Box((*outer, row, *self.offset[tail]), extent)


ITEMSIZE = MappingProxyType(
    {
        "bfloat16": 2,
        "bool": 1,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint8": 1,
    }
)
"""Bytes per element, by torch's name without the prefix."""

DTYPES = MappingProxyType({name: code for code, name in enumerate(ITEMSIZE)})
"""A number for each dtype, for columns."""

CASTABLE = frozenset({"bfloat16", "float16", "float32", "float64"})
"""Dtypes that are cast to one another. float8 is not: its values need a scale, which a cast cannot make."""

MOST_NBYTES = 1 << 52
"""Limit for a tensor and for a model: sums stay exact in int64, and in float64 where NumPy uses it."""

TOO_FAR = f"reaches beyond {MOST_NBYTES} bytes (4 PiB); offsets and strides count bytes, boxes count elements"
"""The text of errors for numbers beyond `MOST_NBYTES`."""


@lru_cache
def _problem(dtype: str, shape: tuple[int, ...]) -> str:
    """Return the fault of a tensor, or "". A model has many tensors, of few shapes."""
    if dtype not in ITEMSIZE:
        return f"unknown dtype {dtype!r}; {nearest(dtype, ITEMSIZE)}"
    if any(dim < 0 for dim in shape):
        return f"shape {shape} has a negative dimension; give sizes of 0 or more"
    # As Python integers, since NumPy's wrap around. Dimensions of 0 count as 1, to limit the others, too.
    nbytes = math.prod(int(dim) or 1 for dim in shape) * ITEMSIZE[dtype]
    if nbytes > MOST_NBYTES:
        spans = f"{dtype} of shape {shape} spans {nbytes} bytes"
        return f"{spans}; give sizes that span at most {MOST_NBYTES} (4 PiB)"
    return ""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor's name, dtype (a key of `ITEMSIZE`) and shape.

    Raises:
        PlanError: the dtype is unknown, the shape has a negative dimension, or it spans more than 4 PiB.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if problem := _problem(self.dtype, tuple(self.shape)):
            raise PlanError(self.name, problem)

    def __reduce__(self) -> tuple[type[TensorMeta], tuple[str, str, tuple[int, ...]]]:
        return TensorMeta, (self.name, self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


_NUM_SHOWN = 5


def suggest(word: str, known: Iterable[str]) -> str:
    """Like `nearest`, for the names of a whole model. Compares few names and shows fewer."""
    return nearest(word, most_alike(word, known))


def most_alike(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are most like `word`, `_NUM_SHOWN` at most."""
    names = sorted(known)
    if len(names) > _NUM_SHOWN:
        alike = nlargest(10 * _NUM_SHOWN, names, key=lambda name: _num_shared(word, name))
        names = get_close_matches(word, alike, n=_NUM_SHOWN, cutoff=0.0)
    return tuple(names)


def _num_shared(one: str, other: str) -> int:
    """Count the characters that both share at their starts and at their ends."""
    ends = (zip(one, other, strict=False), zip(reversed(one), reversed(other), strict=False))
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))) for pairs in ends)


MAPPED = "mapped"


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one box of a tensor is in one rank's memory.

    Attributes:
        tensor: the tensor's name.
        box: which part of it.
        buffer: name of the memory. Segments may share one, as in a fused module.
        byte_offset: bytes from the start of `buffer` to the box's first element.
        strides: bytes from one element to the next, per dimension of the box.
    """

    tensor: str
    box: Box
    buffer: str
    byte_offset: int
    strides: tuple[int, ...]

    # By default a slotted dataclass is unpickled field by field: twice as slow, and there are 20,000 of them.
    def __reduce__(self) -> tuple[type[Segment], tuple[str, Box, str, int, tuple[int, ...]]]:
        return Segment, (self.tensor, self.box, self.buffer, self.byte_offset, self.strides)

    @classmethod
    def whole(cls, meta: TensorMeta, strides: tuple[int, ...] | None = None) -> Segment:
        """Return a whole tensor as one buffer, contiguous without `strides`."""
        box = Box.whole(meta.shape)
        return cls(meta.name, box, meta.name, 0, box.strides(meta.itemsize) if strides is None else strides)

    def start(self, box: Box) -> int:
        """Return the byte in `buffer` at which `box`, a part of the segment's, starts."""
        return self.byte_offset + self.box.distance(box, self.strides)


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A setting that matches no name of a rank.

    Attributes:
        setting, value: the setting and its value, such as ``exclude`` and ``value_head.*``.
        near: the rank's names that are most like the value.
    """

    setting: str
    value: str
    near: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that a rank knows.

    Attributes:
        number: the stage. Ranks of one number may be replicas of each other.
        shared: names of tensors that other stages may hold, too, as of an embedding.
        unmatched: settings that fit none of this rank's names: wrong if they fit no other rank's either.
    """

    number: int = 0
    shared: tuple[str, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()


Cut = tuple[tuple[int, int], ...]
"""How a tensor is cut: (axis of the mesh, dimension of the tensor), in the order of the cuts."""


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A rank's place in a mesh, from which the rank's boxes follow.

    A cut gives all ranks of an axis as many rows as the first rank; the last ranks have fewer or none.

    Attributes:
        sizes: the number of ranks along each axis. Meshes of one rank follow one another.
        coordinates: the rank's coordinates, per axis.
        cuts: the cuts by buffer. Ranks of one mesh have equal cuts.
    """

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    cuts: Mapping[str, Cut]


AS_STORED = "none is converted"
"""The value of `RankLayout.converts` for a rank that takes the tensors of its own checkpoint."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Everything that one rank declares.

    Attributes:
        tensors: the tensors that the rank knows, by the checkpoint's names; ranks may know different tensors.
        segments: the boxes that the rank holds.
        tied: (alias, canonical) pairs. An alias is the same memory, so it has no segments.
        buffers: the live parameters that the segments write, with their local shapes. If there
            are none, this rank's live coverage is not checked (an engine that repacks).
        padding: (buffer, byte_offset, nbytes) that no tensor covers and that is not written.
        device: where the buffers are: ``cuda:<UUID>``, or empty for host memory; `MAPPED` for host
            memory that the holder maps, and that is not published.
        stage: the part of the model that the rank knows, if not all.
        frozen: names of tensors that do not change after the first update.
        converts: the rank's conversion of the tensors, if their values change; for reports.
        stored: the tensors of the rank's own checkpoint, if it converts `tensors` to these. The rank takes
            either.
        draft: the draft model that an engine's rank speculates with.
        arrangement: the experts that the segments follow, if the engine moves experts.
        mesh: a place from which the segments may follow. A layout that follows is sent in few bytes.
    """

    tensors: tuple[TensorMeta, ...]
    segments: tuple[Segment, ...]
    tied: tuple[tuple[str, str], ...] = ()
    buffers: tuple[TensorMeta, ...] = ()
    padding: tuple[tuple[str, int, int], ...] = ()
    device: str = ""
    stage: Stage | None = None
    frozen: tuple[str, ...] = ()
    converts: str = ""
    stored: tuple[TensorMeta, ...] = ()
    draft: Draft | None = None
    arrangement: Arrangement | None = None
    mesh: MeshPlace | None = field(default=None, compare=False)

    def renamed(self, names: Mapping[str, str]) -> RankLayout:
        """Return the layout with other names of tensors. Buffers keep theirs."""

        def new(name: str) -> str:
            return names.get(name, name)

        stage = self.stage and replace(self.stage, shared=tuple(map(new, self.stage.shared)))
        return replace(
            self,
            tensors=tuple(replace(meta, name=new(meta.name)) for meta in self.tensors),
            segments=tuple(replace(each, tensor=new(each.tensor)) for each in self.segments),
            tied=tuple((new(alias), new(name)) for alias, name in self.tied),
            stage=stage,
            frozen=tuple(map(new, self.frozen)),
        )

    def takes_stored(self, names: Collection[str]) -> bool:
        """Return True if `names` of arriving tensors are the names of `stored`. Only these have scales."""
        full = {meta.name for meta in self.tensors}
        return any(meta.name in names for meta in self.stored if meta.name not in full)

    def for_tensors(self, names: Collection[str]) -> RankLayout:
        """Return the layout for tensors of these names: this layout, or `as_stored`."""
        return self.as_stored() if self.takes_stored(names) else self

    def as_stored(self) -> RankLayout:
        """Return the layout of a rank that takes whole tensors of its own checkpoint."""
        segments = tuple(map(Segment.whole, self.stored))
        return RankLayout(
            self.stored, segments, self.tied, device=self.device, converts=AS_STORED, draft=self.draft
        )
