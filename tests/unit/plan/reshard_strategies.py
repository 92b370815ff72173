"""Random trainers and engines in every way of cutting, and copies carried out on plain bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import (
    NUMPY,
    PAD,
    Rank,
    contiguous,
    cuts,
    decoder,
    engine_rank,
    hold,
    live,
    values,
    write,
)
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.cross_host.shuffle import Messages, starts
from weightsync.plan.direct.direct import Reads, Reshard
from weightsync.plan.layout.copies import Copies
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.trainers_layout import TrainersLayout

TIED = ("head", "embed")


@dataclass
class Sides:
    """What the trainers hold, what one engine takes, and what the tensors hold."""

    tensors: list[TensorMeta]
    values: dict[str, np.ndarray] = field(repr=False)
    trainers: list[Rank]
    ranks: list[Rank]
    near: list[list[int]]
    source_tied: bool = False
    engine_tied: bool = False

    def source(self) -> Layout:
        return Layout.from_ranks(self._layouts(self.trainers, self.source_tied))

    def trainer_tables(self) -> list[LayoutTable]:
        return [*map(LayoutTable.of, self._layouts(self.trainers, self.source_tied))]

    def trainers_layout(self) -> TrainersLayout:
        return TrainersLayout(self.trainer_tables())

    def engine(self) -> Layout:
        return Layout.from_ranks(self._layouts(self.ranks, self.engine_tied))

    def _layouts(self, ranks: list[Rank], tied: bool) -> list[RankLayout]:
        tensors = [meta for meta in self.tensors if not (tied and meta.name == TIED[0])]
        return [rank.layout(tensors, [TIED] if tied else []) for rank in ranks]

    def reshard(self, **changes: object) -> Reshard:
        return Reshard(self.source(), "e0", self.engine(), **changes)

    def addresses(self, rank: int) -> tuple[dict[tuple[int, str], int], dict[str, int]]:
        """Where the memories lie in one line of bytes for sources, and in one for the rank's own."""
        sources = {(t, name): m for t, each in enumerate(self.trainers) for name, m in each.memory.items()}
        return _line(sources), _line(self.ranks[rank].memory)

    def source_line(self) -> np.ndarray:
        return np.concatenate([m.ravel() for each in self.trainers for m in each.memory.values()])

    def expected(self, rank: int) -> np.ndarray:
        """The rank's memories after gathering each tensor whole and slicing it."""
        dtypes = {meta.name: meta.dtype for meta in self.tensors}
        made = self.ranks[rank]
        for memory in made.memory.values():
            memory[:] = PAD
        for segment in made.segments:
            made.view(segment, dtypes[segment.tensor])[...] = self.values[segment.tensor][
                segment.box.slices()
            ]
        return np.concatenate(list(made.memory.values()))

    def live_bytes(self, rank: int) -> np.ndarray:
        """Which bytes of the rank's line must be written: 1 or 0."""
        made = self.ranks[rank]
        counts = {name: np.zeros(len(memory), np.uint8) for name, memory in made.memory.items()}
        for meta in made.buffers:
            counts[meta.name][: meta.nbytes] = 1
        for buffer, start, nbytes in made.padding:
            counts[buffer][start : start + nbytes] = 0
        return np.concatenate(list(counts.values()))


def _line(memories: dict) -> dict:
    sizes = [memory.size for memory in memories.values()]
    return dict(zip(memories, itertools.accumulate([0, *sizes[:-1]]), strict=True))


def run(copies: Copies, source: np.ndarray, target: np.ndarray, written: np.ndarray) -> None:
    """Carries out copies between offsets of two arrays of bytes, and counts what is written."""
    for src, dst, rows, row_nbytes, src_pitch, dst_pitch in copies.table().tolist():
        assert 0 <= src <= src + (rows - 1) * src_pitch + row_nbytes <= len(source)
        assert 0 <= dst <= dst + (rows - 1) * dst_pitch + row_nbytes <= len(target)
        to, shape = (slice(dst, None), (rows, row_nbytes))
        view = np.lib.stride_tricks.as_strided
        view(target[to], shape, (dst_pitch, 1))[...] = view(source[src:], shape, (src_pitch, 1))
        view(written[to], shape, (dst_pitch, 1))[...] += 1


def nbytes_by_near(sides: Sides, rank: int) -> dict[int, int]:
    """How many bytes have their nearest holder how far away, element by element."""
    near, found = sides.near[rank], dict.fromkeys(range(4), 0)
    for meta in sides.tensors:
        best = np.full(meta.shape, 9)
        name = TIED[1] if sides.source_tied and meta.name == TIED[0] else meta.name
        for trainer, each in enumerate(sides.trainers):
            for segment in each.segments:
                if segment.tensor == name:
                    where = segment.box.slices()
                    best[where] = np.minimum(best[where], near[trainer])
        for segment in sides.ranks[rank].segments:
            if segment.tensor == meta.name:
                levels, counts = np.unique(best[segment.box.slices()], return_counts=True)
                for level, count in zip(levels.tolist(), counts.tolist(), strict=True):
                    found[level] += count * meta.itemsize
    return {level: nbytes for level, nbytes in found.items() if nbytes}


def reads_by_near(sides: Sides, rank: int, reads: Reads) -> dict[int, int]:
    found: dict[int, int] = {}
    for trainer, nbytes in reads.by_trainer().items():
        level = sides.near[rank][trainer]
        found[level] = found.get(level, 0) + nbytes
    return found


@dataclass(frozen=True)
class Cut:
    """How a mesh of trainers shares one tensor: the dimension that each axis cuts (or none), and the
    only row of the mesh that has it (or all)."""

    dims: tuple[int | None, int | None]
    owner: int | None


@st.composite
def ways(draw: st.DrawFn, ndim: int, mesh: tuple[int, int]) -> Cut:
    """FSDP, HSDP, tensor and expert parallel, pipeline stages, and mixtures."""
    dims = draw(st.permutations([None, None, *range(ndim)]))[:2]
    owner = draw(st.none() | st.integers(0, mesh[0] - 1))
    return Cut((None if owner is not None else dims[0], dims[1]), owner)


def part(meta: TensorMeta, cut: Cut, mesh: tuple[int, int], row: int, column: int) -> Box:
    offset, extent = [0] * len(meta.shape), list(meta.shape)
    for dim, parts, index in zip(cut.dims, mesh, (row, column), strict=True):
        if dim is not None:
            offset[dim], extent[dim] = cuts(meta.shape[dim], parts)[index]
    return Box(tuple(offset), tuple(extent))


def hold_flat(rank: Rank, held: Iterable[tuple[TensorMeta, Box, np.ndarray]]) -> None:
    """All boxes one after the other in one buffer, as FSDP's flat parameters are."""
    chunks: list[np.ndarray] = []
    at = 0
    for meta, box, value in held:
        raw = np.frombuffer(value[box.slices()].tobytes(), np.uint8)
        rank.segments.append(Segment(meta.name, box, "flat", at, contiguous(box.extent, meta.itemsize)))
        chunks.append(raw)
        at += len(raw)
    rank.memory["flat"] = np.concatenate([*chunks, np.zeros(1, np.uint8)])


def hold_groups(rank: Rank, by_name: dict[str, TensorMeta], world: dict, groups: range, total: int) -> None:
    """Megatron's qkv: per KV group its q rows, then its k rows, then its v rows."""
    chunks, at = [], 0
    for group in groups:
        for name in "qkv":
            meta = by_name[name]
            rows, hidden = meta.shape[0] // total, meta.shape[1]
            box = Box((group * rows, 0), (rows, hidden))
            strides = contiguous(box.extent, meta.itemsize)
            rank.segments.append(Segment(name, box, "linear_qkv", at, strides))
            chunks.append(np.frombuffer(world[name][box.slices()].tobytes(), np.uint8))
            at += len(chunks[-1])
    rank.memory["linear_qkv"] = np.concatenate([*chunks, np.zeros(1, np.uint8)])


def stacked_rank(
    rank: Rank, by_name: dict[str, TensorMeta], parallel: int, index: int, by_expert: bool, split: bool
) -> None:
    """The stacked experts: dealt out whole, or cut in [E, 2F, H] and in the columns of [E, H, F]."""
    experts, hidden, ffn = by_name["stacked_down"].shape
    first, mine = cuts(experts, parallel)[index] if by_expert else (0, experts)
    low, width = (0, ffn) if by_expert else cuts(ffn, parallel)[index]
    dtype = by_name["stacked_down"].dtype
    live(rank, "w13_stacked", dtype, (mine, 2 * width, hidden))
    live(rank, "w2_stacked", dtype, (mine, hidden, width))
    runs = [(e, 1) for e in range(mine)] if split else [(0, mine)]
    for start, count in runs:
        for place in range(2):
            box = Box((first + start, place * ffn + low, 0), (count, width, hidden))
            write(rank, by_name["stacked_gate_up"], box, "w13_stacked", (start, place * width, 0))
        box = Box((first + start, 0, low), (count, hidden, width))
        write(rank, by_name["stacked_down"], box, "w2_stacked", (start, 0, 0))


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    """A decoder with single and stacked experts between any mesh of trainers and any engine."""
    parallel = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([k for k in (1, 2, 4, 8) if k % parallel == 0 or parallel % k == 0]))
    experts, hidden, ffn = draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(sorted(NUMPY)))
    tensors = decoder(dtype, parallel, hidden, kv_heads, experts, draw(st.integers(1, 11)))
    stacked = draw(st.integers(0, 5))
    tensors += [
        TensorMeta("stacked_gate_up", dtype, (stacked, 2 * ffn, hidden)),
        TensorMeta("stacked_down", dtype, (stacked, hidden, ffn)),
    ]
    by_name = {meta.name: meta for meta in tensors}
    tensors.append(TensorMeta(TIED[0], dtype, by_name["embed"].shape))
    made = Sides(tensors, values(tensors, draw(st.integers(0, 2**32 - 1))), [], [], [])
    made.source_tied, made.engine_tied = draw(st.sampled_from([(0, 0), (1, 1), (1, 0)]))
    if made.source_tied:
        made.values[TIED[0]] = made.values[TIED[1]]
    _draw_trainers(draw, made, kv_heads)
    by_expert, split = draw(st.booleans()), draw(st.booleans())
    for _, index in itertools.product(range(draw(st.integers(1, 2))), range(parallel)):
        rank = engine_rank(tensors, parallel, index, kv_heads, experts)
        stacked_rank(rank, by_name, parallel, index, by_expert, split)
        if not made.engine_tied:
            live(rank, TIED[0], dtype, by_name["embed"].shape)
            write(rank, tensors[-1], Box((0, 0), by_name["embed"].shape), TIED[0], (0, 0))
        made.ranks.append(rank)
        levels = st.integers(0, 3)
        made.near.append(draw(st.lists(levels, min_size=len(made.trainers), max_size=len(made.trainers))))
    return made


def _draw_trainers(draw: st.DrawFn, made: Sides, kv_heads: int) -> None:
    by_name = {meta.name: meta for meta in made.tensors}
    mesh = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    cut = {name: draw(ways(len(meta.shape), mesh)) for name, meta in by_name.items()}
    groups = kv_heads % mesh[1] == 0 and by_name["q"].shape[0] % kv_heads == 0 and draw(st.booleans())
    held = [
        name
        for name in by_name
        if not (made.source_tied and name == TIED[0]) and not (groups and name in "qkv")
    ]
    flat = draw(st.booleans())
    order = draw(st.permutations(held))
    for row, column in itertools.product(*map(range, mesh)):
        rank = Rank()
        mine = [name for name in (order if flat else held) if cut[name].owner in (None, row)]
        boxes = [(by_name[n], part(by_name[n], cut[n], mesh, row, column), made.values[n]) for n in mine]
        if flat:
            hold_flat(rank, boxes)
        else:
            for meta, box, value in boxes:
                hold(rank, meta, box, value)
        if groups:
            each = kv_heads // mesh[1]
            local = range(column * each, (column + 1) * each)
            hold_groups(rank, by_name, made.values, local, kv_heads)
        made.trainers.append(rank)


@st.composite
def tilings(draw: st.DrawFn) -> Sides:
    """Tensors that each side cuts into boxes at will, each box a buffer."""
    ndim = draw(st.integers(1, 3))
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 6)] * ndim), min_size=1, max_size=3))
    tensors = [TensorMeta(f"t{number}", "int8", shape) for number, shape in enumerate(shapes)]
    made = Sides(tensors, values(tensors, draw(st.integers(0, 99))), [Rank(), Rank()], [Rank()], [[0, 0]])
    for meta in tensors:
        whole = Box((0,) * ndim, meta.shape)
        for box in _split(draw, whole, 6):
            hold(made.trainers[draw(st.integers(0, 1))], meta, box, made.values[meta.name])
        for number, box in enumerate(_split(draw, whole, 6)):
            live(made.ranks[0], f"{meta.name}/{number}", meta.dtype, box.extent)
            write(made.ranks[0], meta, box, f"{meta.name}/{number}", (0,) * ndim)
    return made


def _split(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """`box`, or two parts of it, each cut again."""
    long = [dim for dim, size in enumerate(box.extent) if size > 1]
    if not long or not depth or not draw(st.integers(0, 3)):
        return [box]
    dim = draw(st.sampled_from(long))
    size = draw(st.integers(1, box.extent[dim] - 1))
    offset, low, high = list(box.offset), list(box.extent), list(box.extent)
    offset[dim] += size
    low[dim], high[dim] = size, high[dim] - size
    parts = Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))
    return [each for part in parts for each in _split(draw, part, depth - 1)]


def packs(moved: Messages, number: int, src: Mapping[str, int]) -> Copies:
    """The copies that fill a message at address 0."""
    return moved.pack(number, starts(moved.reads.src_names, src), 0)


def unpacks(moved: Messages, turn: int, dst: Mapping[str, int]) -> Copies:
    """The copies out of a round at address 0."""
    return moved.unpack(turn, 0, starts(moved.reads.dst_names, dst))
