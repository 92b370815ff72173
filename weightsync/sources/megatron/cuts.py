"""Finds the boxes of a checkpoint's tensors in a parameter that Megatron cuts over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from functools import partial
from types import MappingProxyType

from weightsync.errors import ConfigError, PlanError
from weightsync.plan import Box


@unique
class Cut(Enum):
    """How one parameter is cut. n is the size of the tensor-parallel group.

    Experts use the expert-tensor-parallel group instead.
    """

    WHOLE = "whole"
    """Each rank holds the whole tensor: norms, routers."""
    ROWS = "rows"
    """Each rank holds 1/n of the rows: column-parallel layers, whose weights are stored output-major."""
    COLUMNS = "columns"
    """Each rank holds 1/n of the columns: row-parallel layers."""
    VOCABULARY = "vocabulary"
    """As `ROWS`. The last rows are padding, which the checkpoint does not have."""
    GATED = "gated"
    """Two tensors, gate and up. Each rank holds its rows of gate, then its rows of up."""
    QKV = "qkv"
    """Three tensors, interleaved by query group: query heads, a key head and a value head. The interleaved
    rows are cut evenly, so a group is split if there are fewer groups than ranks."""
    Q_LATENT = "q_latent"
    """The rows of MLA's query down-projection: whole on each rank, or cut, by the layer's kind."""
    KV_LATENT = "kv_latent"
    """The rows of MLA's key-value down-projection and the rotary key: whole, or cut."""
    STACKED_GATED = "stacked_gated"
    """Gate and up of all local experts, input-major: memory of shape [experts, inputs, 2 · outputs / n]."""
    STACKED_ROWS = "stacked_rows"
    """As `STACKED_GATED`, without a gate: [experts, inputs, outputs / n]."""
    STACKED_COLUMNS = "stacked_columns"
    """Down-projections of all local experts, input-major: [experts, inputs / n, outputs]."""

    @property
    def num_tensors(self) -> int:
        """The number of tensors in a parameter with this cut."""
        return {Cut.QKV: 3, Cut.GATED: 2, Cut.STACKED_GATED: 2}.get(self, 1)

    @property
    def is_latent(self) -> bool:
        """Return True if the layer's kind decides whether the parameter is cut."""
        return self in (Cut.Q_LATENT, Cut.KV_LATENT)

    @property
    def axis(self) -> int | None:
        """The parameter's dimension that is cut over ranks. None for `WHOLE`."""
        if self is Cut.WHOLE:
            return None
        return 1 if self in (Cut.COLUMNS, Cut.STACKED_GATED, Cut.STACKED_ROWS) else 0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank's number in a process group, and the group's size."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model that do not follow from a local parameter's shape.

    Attributes:
        vocab_size: the checkpoint's rows of the embedding, without padding.
        num_heads, num_query_groups, head_dim: of attention.
        q_latent, kv_latent: rows of MLA's down-projections, 0 without MLA.
        num_local_experts: experts of a layer that one rank holds.
    """

    vocab_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    q_latent: int = 0
    kv_latent: int = 0
    num_local_experts: int = 0


@dataclass(frozen=True, slots=True)
class Array:
    """A parameter on this rank: name, shape, and bytes from one element to the next."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a checkpoint's tensor in a local parameter.

    Attributes:
        tensor: number of the tensor among the parameter's tensors.
        shape: the tensor's shape.
        box: the part that this rank holds.
        start: bytes from the parameter's first element to the box's first.
        strides: bytes from one element of the box to the next, per dimension.
        expert: number of the expert among this rank's stacked experts.
    """

    tensor: int
    shape: tuple[int, ...]
    box: Box
    start: int
    strides: tuple[int, ...]
    expert: int = 0


def parts(cut: Cut, array: Array, group: RankGroup, sizes: Sizes) -> tuple[HeldBox, ...]:
    """Return the nonempty boxes that a rank of `group` holds in `array`.

    Raises:
        ConfigError: the padded vocabulary has fewer rows than `sizes.vocab_size`.
        PlanError: the parameter's shape does not fit the model's sizes.
    """
    return tuple(part for part in _CUTTERS[cut](array, group, sizes) if part.box.numel)


def _whole(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    yield HeldBox(0, array.shape, Box.whole(array.shape), 0, array.strides)


def _rows(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    count = array.shape[0]
    yield _run(array, 0, count * group.size, 0, count, count * group.rank)


def _columns(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    if len(array.shape) != 2:
        raise PlanError(
            array.name, f"shape {array.shape}: a parameter that is cut by columns has two dimensions"
        )
    rows, count = array.shape
    box = Box((0, count * group.rank), array.shape)
    yield HeldBox(0, (rows, count * group.size), box, 0, array.strides)


def _vocabulary(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    count, vocab_size = array.shape[0], sizes.vocab_size
    if count * group.size < vocab_size:
        padded = f"{array.name} has {count * group.size} rows over {group.size} ranks"
        raise ConfigError("vocab_size", vocab_size, f"give the checkpoint's number of tokens; {padded}")
    first = min(count * group.rank, vocab_size)
    yield _run(array, 0, vocab_size, 0, min(count, vocab_size - first), first)


def _gated(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    half, odd = divmod(array.shape[0], 2)
    if odd:
        raise PlanError(array.name, f"{array.shape[0]} rows; gate and up have as many rows each")
    for tensor in range(2):
        yield _run(array, tensor, half * group.size, tensor * half, half, half * group.rank)


def _qkv(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    """Yield the overlaps of this rank's rows with queries, key and value of all groups."""
    groups, dim, rows = sizes.num_query_groups, sizes.head_dim, array.shape[0]
    queries = sizes.num_heads // groups
    per_group = (queries + 2) * dim
    if rows * group.size != groups * per_group:
        wanted = f"{groups} query groups of {queries} + 2 heads of {dim}"
        raise PlanError(array.name, f"{rows} rows on each of {group.size} ranks; the model has {wanted}")
    low, high = rows * group.rank, rows * (group.rank + 1)
    for number in range(low // per_group, math.ceil(high / per_group)):
        at = number * per_group
        for tensor, count in enumerate((queries * dim, dim, dim)):
            first, last = max(at, low), min(at + count, high)
            if first < last:
                offset = number * count + first - at
                yield _run(array, tensor, groups * count, first - low, last - first, offset)
            at += count


def _latent(array: Array, group: RankGroup, rows: int) -> Iterator[HeldBox]:
    count = array.shape[0]
    if rows not in (count, count * group.size):
        raise PlanError(array.name, f"{count} rows on each of {group.size} ranks; the model has {rows}")
    yield _run(array, 0, rows, 0, count, 0 if count == rows else count * group.rank)


def _stacked_outputs(array: Array, group: RankGroup, sizes: Sizes, num_tensors: int) -> Iterator[HeldBox]:
    """Yield each expert's [outputs, inputs] of memory that is [experts, inputs, tensors · outputs]."""
    (inputs, width), num_experts = array.shape, sizes.num_local_experts
    itemsize = _stack_itemsize(array, width, num_experts * num_tensors)
    count = width // num_experts // num_tensors
    shape, box = (count * group.size, inputs), Box((count * group.rank, 0), (count, inputs))
    strides = (itemsize, num_tensors * count * itemsize)
    for expert in range(num_experts):
        for tensor in range(num_tensors):
            start = (expert * inputs * num_tensors + tensor) * count * itemsize
            yield HeldBox(tensor, shape, box, start, strides, expert)


def _stacked_columns(array: Array, group: RankGroup, sizes: Sizes) -> Iterator[HeldBox]:
    """Yield each expert's [outputs, inputs] of memory that is [experts, inputs, outputs]."""
    height, outputs = array.shape
    itemsize = _stack_itemsize(array, height, sizes.num_local_experts)
    count = height // sizes.num_local_experts
    shape, box = (outputs, count * group.size), Box((0, count * group.rank), (outputs, count))
    for expert in range(sizes.num_local_experts):
        start = expert * count * outputs * itemsize
        yield HeldBox(0, shape, box, start, (itemsize, outputs * itemsize), expert)


_CUTTERS: Mapping[Cut, Callable[[Array, RankGroup, Sizes], Iterator[HeldBox]]] = MappingProxyType(
    {
        Cut.WHOLE: _whole,
        Cut.ROWS: _rows,
        Cut.COLUMNS: _columns,
        Cut.VOCABULARY: _vocabulary,
        Cut.GATED: _gated,
        Cut.QKV: _qkv,
        Cut.Q_LATENT: lambda array, group, sizes: _latent(array, group, sizes.q_latent),
        Cut.KV_LATENT: lambda array, group, sizes: _latent(array, group, sizes.kv_latent),
        Cut.STACKED_GATED: partial(_stacked_outputs, num_tensors=2),
        Cut.STACKED_ROWS: partial(_stacked_outputs, num_tensors=1),
        Cut.STACKED_COLUMNS: _stacked_columns,
    }
)


def _run(array: Array, tensor: int, rows: int, at: int, count: int, offset: int) -> HeldBox:
    """Return `count` rows from row `at` of the array: rows from `offset` of a tensor of `rows` rows."""
    shape, inner = (rows, *array.shape[1:]), (0,) * (len(array.shape) - 1)
    box = Box((offset, *inner), (count, *array.shape[1:]))
    return HeldBox(tensor, shape, box, at * array.strides[0], array.strides)


def _stack_itemsize(array: Array, width: int, num_blocks: int) -> int:
    """Return the bytes per element of a contiguous stack, of which `width` holds `num_blocks` blocks."""
    itemsize = array.strides[1]
    if array.strides[0] != array.shape[1] * itemsize:
        raise PlanError(array.name, "stacked experts are not contiguous in memory")
    if not num_blocks or width % num_blocks:
        raise PlanError(array.name, f"shape {array.shape} is not a stack of {num_blocks} equal blocks")
    return itemsize
