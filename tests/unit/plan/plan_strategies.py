"""Random layouts of both sides, and an executor that carries a plan out on numpy arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan

PAD = 0xA5
"""What live parameters are filled with before an update: padding must still hold it after."""

NUMPY = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8, "int64": np.uint64}
"""Bits are moved, never numbers, so an unsigned type of the same width stands for each dtype."""


@dataclass
class Rank:
    """One rank's declaration and its memory, by buffer name."""

    segments: list[Segment] = field(default_factory=list)
    buffers: list[TensorMeta] = field(default_factory=list)
    padding: list[tuple[str, int, int]] = field(default_factory=list)
    memory: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    def layout(self, tensors: Sequence[TensorMeta], tied: Sequence[tuple[str, str]] = ()) -> RankLayout:
        return RankLayout(
            tuple(tensors), tuple(self.segments), tuple(tied), tuple(self.buffers), tuple(self.padding)
        )

    def view(self, segment: Segment, dtype: str) -> np.ndarray:
        """The segment's elements, strided, in place."""
        raw = self.memory[segment.buffer].reshape(-1)
        if not segment.box.numel:
            return np.empty(segment.box.extent, NUMPY[dtype])
        return np.ndarray(
            segment.box.extent, NUMPY[dtype], raw.data, offset=segment.byte_offset, strides=segment.strides
        )


@dataclass
class World:
    """Both sides of one update, and what the tensors hold."""

    tensors: list[TensorMeta]
    values: dict[str, np.ndarray] = field(repr=False)
    trainers: list[Rank]
    engines: dict[str, list[Rank]]
    tied: list[tuple[str, str]] = field(default_factory=list)
    roots: tuple[int, ...] = ()
    frozen: frozenset[str] = frozenset()

    def source(self) -> Layout:
        ranks = [rank.layout(self.tensors, self.tied) for rank in self.trainers]
        return replace(Layout.from_ranks(ranks), frozen=self.frozen)

    def targets(self) -> dict[str, Layout]:
        return {
            name: Layout.from_ranks([rank.layout(self.tensors, self.tied) for rank in ranks])
            for name, ranks in self.engines.items()
        }

    def members(self) -> Members:
        """Engine ranks have the first holders, trainers those of `roots`: shared, apart or several on one."""
        counter = itertools.count()
        engines = tuple((name, tuple(next(counter) for _ in ranks)) for name, ranks in self.engines.items())
        return Members(max(next(counter), *(root + 1 for root in self.roots)), self.roots, engines)

    def plan(self, bucket_bytes: int = 1024, **changes: object) -> Plan:
        settings = {"max_staging_bytes": 1 << 40, **changes}
        return make_plan(self.source(), self.targets(), self.members(), bucket_bytes=bucket_bytes, **settings)


def contiguous(extent: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    strides, step = [], itemsize
    for size in reversed(extent):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def hold(rank: Rank, meta: TensorMeta, box: Box, value: np.ndarray) -> None:
    """The trainer holds `box` as a tensor of its own, strided by a column of slack."""
    wide = (*box.extent[:-1], box.extent[-1] + 3) if box.ndim else ()
    name = f"{meta.name}@{sum(each.tensor == meta.name for each in rank.segments)}"
    local = np.zeros(wide, NUMPY[meta.dtype])
    if box.numel:
        local[tuple(slice(0, e) for e in box.extent)] = value[box.slices()]
    rank.memory[name] = local.view(np.uint8) if local.ndim else local.reshape(1).view(np.uint8)
    rank.segments.append(Segment(meta.name, box, name, 0, contiguous(wide, meta.itemsize)))


def live(rank: Rank, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    meta = TensorMeta(name, dtype, shape)
    rank.buffers.append(meta)
    rank.memory[name] = np.full(max(meta.nbytes, 1), PAD, np.uint8)


def write(rank: Rank, meta: TensorMeta, box: Box, buffer: str, at: tuple[int, ...]) -> None:
    """`box` goes to index `at` of a live parameter; leading dimensions it lacks are stacked ones."""
    shape = next(b.shape for b in rank.buffers if b.name == buffer)
    strides = contiguous(shape, meta.itemsize)
    start = sum(i * s for i, s in zip(at, strides, strict=True))
    rank.segments.append(Segment(meta.name, box, buffer, start, strides[len(shape) - box.ndim :]))


def cuts(size: int, num_parts: int) -> list[tuple[int, int]]:
    """FSDP's split: equal chunks, the last ones shorter or empty; (offset, extent) each."""
    chunk = -(-size // num_parts)
    return [(min(i * chunk, size), max(min(chunk, size - i * chunk), 0)) for i in range(num_parts)]


def share(meta: TensorMeta, mesh: tuple[int, int], row: int, column: int, dims: int) -> Box:
    """The part of rank (row, column): split over `mesh` in the first `dims` dimensions, else replicated."""
    offset, extent = [0] * len(meta.shape), list(meta.shape)
    for dim, (parts, index) in enumerate(zip(mesh, (row, column), strict=True)):
        if dim < min(dims, len(meta.shape)):
            offset[dim], extent[dim] = cuts(meta.shape[dim], parts)[index]
    return Box(tuple(offset), tuple(extent))


def values(tensors: Sequence[TensorMeta], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        meta.name: rng.integers(0, 255, (*meta.shape, meta.itemsize), np.uint8)
        .view(NUMPY[meta.dtype])
        .reshape(meta.shape)
        for meta in tensors
    }


def decoder(
    dtype: str, tensor_parallel: int, hidden: int, kv_heads: int, experts: int, vocab: int
) -> list[TensorMeta]:
    """A transformer layer in small: every way in which an engine fuses, stacks, pads and shards."""
    head, ffn = 2, 3 * tensor_parallel
    shapes: dict[str, tuple[int, ...]] = {
        "scale": (),
        "nothing": (0, hidden),
        "embed": (vocab, hidden),
        "norm": (hidden,),
        "q": (tensor_parallel * head, hidden),
        "k": (kv_heads * head, hidden),
        "v": (kv_heads * head, hidden),
        "o": (hidden, tensor_parallel * head),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        **{f"experts.{e}.{part}": (ffn, hidden) for e in range(experts) for part in ("w1", "w3")},
    }
    return [TensorMeta(name, dtype, shape) for name, shape in shapes.items()]


def engine_rank(tensors: Sequence[TensorMeta], parallel: int, rank: int, kv_heads: int, experts: int) -> Rank:
    """What a tensor-parallel rank serves: fused, stacked, row and column blocks, a padded vocabulary."""
    by_name = {meta.name: meta for meta in tensors}
    made = Rank()
    for name in ("scale", "nothing", "norm"):
        meta = by_name[name]
        live(made, name, meta.dtype, meta.shape)
        write(made, meta, Box((0,) * len(meta.shape), meta.shape), name, (0,) * len(meta.shape))
    _embed(made, by_name["embed"], parallel, rank)
    _fused(made, by_name, parallel, rank, kv_heads)
    _columns(made, by_name["o"], parallel, rank)
    _columns(made, by_name["down"], parallel, rank)
    _gate_up(made, by_name, parallel, rank)
    _stacked(made, by_name, parallel, rank, experts)
    return made


def _embed(rank: Rank, meta: TensorMeta, parallel: int, index: int) -> None:
    vocab, hidden = meta.shape
    rows = -(-vocab // parallel)
    low, size = cuts(vocab, parallel)[index]
    live(rank, "embed", meta.dtype, (rows, hidden))
    write(rank, meta, Box((low, 0), (size, hidden)), "embed", (0, 0))
    if size < rows:
        line = hidden * meta.itemsize
        rank.padding.append(("embed", size * line, (rows - size) * line))


def _fused(rank: Rank, by_name: dict[str, TensorMeta], parallel: int, index: int, kv_heads: int) -> None:
    """qkv in one parameter; KV heads are replicated where there are fewer than ranks."""
    head, hidden = by_name["q"].shape[0] // parallel, by_name["q"].shape[1]
    mine = max(kv_heads // parallel, 1) * head
    start = index * kv_heads // parallel * head
    live(rank, "qkv", by_name["q"].dtype, (head + 2 * mine, hidden))
    write(rank, by_name["q"], Box((index * head, 0), (head, hidden)), "qkv", (0, 0))
    write(rank, by_name["k"], Box((start, 0), (mine, hidden)), "qkv", (head, 0))
    write(rank, by_name["v"], Box((start, 0), (mine, hidden)), "qkv", (head + mine, 0))


def _columns(rank: Rank, meta: TensorMeta, parallel: int, index: int) -> None:
    """A column block, stored transposed: its live parameter is strided both ways."""
    hidden, width = meta.shape[0], meta.shape[1] // parallel
    live(rank, meta.name, meta.dtype, (width, hidden))
    strides = (meta.itemsize, hidden * meta.itemsize)
    box = Box((0, index * width), (hidden, width))
    rank.segments.append(Segment(meta.name, box, meta.name, 0, strides))


def _gate_up(rank: Rank, by_name: dict[str, TensorMeta], parallel: int, index: int) -> None:
    """gate and up rows interleaved in one parameter."""
    rows, hidden = by_name["gate"].shape[0] // parallel, by_name["gate"].shape[1]
    line = hidden * by_name["gate"].itemsize
    live(rank, "gate_up", by_name["gate"].dtype, (2 * rows, hidden))
    for place, name in enumerate(("gate", "up")):
        box = Box((index * rows, 0), (rows, hidden))
        strides = (2 * line, by_name[name].itemsize)
        rank.segments.append(Segment(name, box, "gate_up", place * line, strides))


def _stacked(rank: Rank, by_name: dict[str, TensorMeta], parallel: int, index: int, experts: int) -> None:
    """Stacked experts [E, 2F, H]."""
    if not experts:
        return
    rows, hidden = by_name["gate"].shape[0] // parallel, by_name["gate"].shape[1]
    live(rank, "w13", by_name["gate"].dtype, (experts, 2 * rows, hidden))
    for expert in range(experts):
        for place, part in enumerate(("w1", "w3")):
            box = Box((index * rows, 0), (rows, hidden))
            write(rank, by_name[f"experts.{expert}.{part}"], box, "w13", (expert, place * rows, 0))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A decoder over a random trainer mesh (sharded, gridded, replicated) and 1 to 2 engines."""
    parallel = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([k for k in (1, 2, 4, 8) if k % parallel == 0 or parallel % k == 0]))
    experts = draw(st.integers(0, 3))
    tensors = decoder(
        draw(st.sampled_from(sorted(NUMPY))),
        parallel,
        draw(st.integers(1, 9)),
        kv_heads,
        experts,
        draw(st.integers(1, 11)),
    )
    world = World(tensors, values(tensors, draw(st.integers(0, 2**32 - 1))), [], {})
    mesh = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    dims = {meta.name: draw(st.integers(0, 2)) for meta in tensors}
    for row, column in itertools.product(range(mesh[0]), range(mesh[1])):
        rank = Rank()
        for meta in tensors:
            hold(rank, meta, share(meta, mesh, row, column, dims[meta.name]), world.values[meta.name])
        world.trainers.append(rank)
    num_trainers = len(world.trainers)
    roots = st.lists(st.integers(0, num_trainers + 2), min_size=num_trainers, max_size=num_trainers)
    world.roots = tuple(draw(st.permutations(range(num_trainers)) | roots))
    for number in range(draw(st.integers(1, 2))):
        world.engines[f"e{number}"] = [
            engine_rank(tensors, parallel, index, kv_heads, experts) for index in range(parallel)
        ]
    return world


def execute(world: World, plan: Plan) -> None:
    """Trainers fill their send buffers, steps fill buckets, pieces reach the engines' live parameters."""
    send_buffers = [fill_send_buffer(world, plan, trainer) for trainer in range(len(world.trainers))]
    for bucket in plan.buckets():
        buffer = np.zeros(bucket.nbytes, np.uint8)
        for step in bucket.steps:
            sent = send_buffers[step.trainer][step.send_buffer_offset : step.send_buffer_offset + step.nbytes]
            buffer[step.offset : step.offset + step.nbytes] = sent
        for piece in bucket.pieces:
            meta = plan.tensors[piece.tensor]
            data = buffer[piece.offset : piece.offset + piece.nbytes].view(NUMPY[meta.dtype])
            for ranks in world.engines.values():
                for rank in ranks:
                    scatter(rank, meta, piece.box, data.reshape(piece.box.extent))


def fill_send_buffer(world: World, plan: Plan, trainer: int) -> np.ndarray:
    send_buffer = np.zeros(plan.send_buffer_nbytes(trainer), np.uint8)
    rank, tied = world.trainers[trainer], dict(world.tied)
    for piece in plan.trainer_pieces(trainer):
        meta = plan.tensors[piece.tensor]
        name = tied.get(meta.name, meta.name)
        segment = next(s for s in rank.segments if s.tensor == name and s.box.contains(piece.box))
        data = rank.view(segment, meta.dtype)[piece.box.slices(segment.box)]
        raw = np.frombuffer(data.tobytes(), np.uint8)
        send_buffer[piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes] = raw
    return send_buffer


def scatter(rank: Rank, meta: TensorMeta, box: Box, data: np.ndarray) -> None:
    for segment in rank.segments:
        common = box.intersect(segment.box) if segment.tensor == meta.name else None
        if common is not None:
            rank.view(segment, meta.dtype)[common.slices(segment.box)] = data[common.slices(box)]


def check_live(world: World) -> None:
    """Every live parameter holds what gathering and slicing gives, and its padding is as before."""
    for ranks in world.engines.values():
        for rank in ranks:
            dtypes = {meta.name: meta.dtype for meta in world.tensors}
            for segment in rank.segments:
                expected = world.values[segment.tensor][segment.box.slices()]
                np.testing.assert_array_equal(rank.view(segment, dtypes[segment.tensor]), expected)
            for buffer, start, nbytes in rank.padding:
                assert (rank.memory[buffer][start : start + nbytes] == PAD).all()


def replace_segment(rank: Rank, index: int, **changes: object) -> None:
    rank.segments[index] = replace(rank.segments[index], **changes)
