"""Tensors that are cut alike are planned once, and read as if each were planned."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import PAD
from tests.unit.plan.reshard_strategies import Sides, run, sides
from weightsync.plan import Box, Layout, RankLayout, Reads, Reshard, Segment, TensorMeta
from weightsync.plan.cross_host import host_bundles
from weightsync.plan.cross_host.cross_host_parts import CrossHostParts, Needs
from weightsync.plan.cross_host.shuffle import Lane
from weightsync.plan.direct import alike
from weightsync.plan.direct.alike import Alike, AlikeReshard, LocalReads
from weightsync.plan.layout import tensor_rows
from weightsync.plan.layout.column import row_codes
from weightsync.plan.layout.layout import columns
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.plan.layout.segment import MeshPlace
from weightsync.plan.layout.trainers_layout import TrainersLayout


def by_trainer(reads: Reads) -> list[list[int]]:
    order = np.argsort(reads.trainer, kind="stable")
    return [column[order].tolist() for column in columns(reads).values()]


def joined(ranks: Sequence[RankLayout]) -> TrainersLayout:
    """The layouts of trainers as the driver joins them: those with equal outlines follow from one."""
    tables = [LayoutTable.of(rank) for rank in ranks]
    of_key: dict[bytes, LayoutTable] = {}
    pairs = [(table, table.outline()) for table in tables]
    return TrainersLayout([of_key.setdefault(each.key, table).of_rank(each) for table, each in pairs])


def pair(source: TrainersLayout, engine: Layout, least: int = 0) -> AlikeReshard | None:
    with mock.patch.object(alike, "LEAST_ALIKE", least):
        return AlikeReshard.of(source, "e0", engine, frozenset(engine.names))


@dataclass
class Model:
    """Layers of equal tensors, without replicas at the trainers, and an engine's ranks."""

    trainers: TrainersLayout
    engine: Layout

    @property
    def source(self) -> Layout:
        return self.trainers.whole

    @property
    def near(self) -> list[int]:
        return [2] * self.trainers.num_ranks


def cut(
    shape: tuple[int, ...], dims: Sequence[int | None], parts: Sequence[int], place: Sequence[int]
) -> Box:
    """The box at `place`, after each of `dims` was cut in turn, as torch cuts."""
    offset, extent = [0] * len(shape), list(shape)
    for dim, size, at in zip(dims, parts, place, strict=True):
        if dim is not None:
            most = -(-extent[dim] // size)
            start = min(most * at, extent[dim])
            offset[dim], extent[dim] = offset[dim] + start, min(most, extent[dim] - start)
    return Box(tuple(offset), tuple(extent))


@st.composite
def models(draw: st.DrawFn) -> Model:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    size, layers = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    names = "abcde"[: draw(st.integers(1, 5))]
    shapes = {n: tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))) for n in names}
    dtypes = {n: draw(st.sampled_from(["bfloat16", "float32"])) for n in names}
    ours = {n: [draw(st.integers(0, len(shapes[n]) - 1)) for _ in mesh] for n in names}
    theirs = {n: [draw(st.none() | st.integers(0, len(shapes[n]) - 1))] for n in names}
    fused = draw(st.sets(st.sampled_from(names)))
    metas = [TensorMeta(f"{n}{layer}", dtypes[n], shapes[n]) for layer in range(layers) for n in names]
    # Some tensors are cut otherwise than their like in other layers.
    odd = draw(st.sets(st.sampled_from([meta.name for meta in metas]), max_size=2))

    states_mesh = draw(st.booleans())

    def rank(
        cuts: Mapping[str, Sequence[int | None]], parts: Sequence[int], place: Sequence[int], fuses: bool
    ) -> RankLayout:
        segments, taken, held = [], Counter[str](), {}
        for meta in metas:
            dims = [0 if meta.name in odd else dim for dim in cuts[meta.name[0]]]
            held[meta.name] = tuple((axis, dim) for axis, dim in enumerate(dims) if dim is not None)
            box = cut(meta.shape, dims, parts, place)
            buffer = f"fused {meta.name[1:]}" if fuses and meta.name[0] in fused else meta.name
            segments.append(Segment(meta.name, box, buffer, taken[buffer], box.strides(meta.itemsize)))
            taken[buffer] += box.numel * meta.itemsize
        stated = MeshPlace(tuple(parts), tuple(place), held) if states_mesh and not fuses else None
        return RankLayout(tuple(metas), tuple(segments), mesh=stated)

    trainers = [rank(ours, mesh, place, fuses=False) for place in np.ndindex(*mesh)]
    engine = [rank(theirs, (size,), (number,), fuses=True) for number in range(size)]
    return Model(joined(trainers), Layout.from_ranks(engine))


@given(models(), st.booleans())
def test_reads_in_kinds_are_those_of_all_tensors(model: Model, unlucky: bool) -> None:
    """Also if the rows of all tensors have one code, so that only a comparison tells them apart."""
    codes = (lambda columns: row_codes(columns) * np.uint64(0)) if unlucky else row_codes
    with mock.patch.object(alike, "row_codes", codes), mock.patch.object(tensor_rows, "row_codes", codes):
        pairs = pair(model.trainers, model.engine)
    assert pairs
    reshard = Reshard(model.source, "e0", model.engine)
    for rank in range(model.engine.num_ranks):
        found, wanted = pairs.reads(rank, model.near).whole(), reshard.reads(rank, model.near, start=0)
        assert by_trainer(found) == by_trainer(wanted)
        assert (found.src_names, found.dst_names) == (wanted.src_names, wanted.dst_names)


@given(sides(), st.data())
def test_layouts_of_every_way_of_cutting_are_read_alike(made: Sides, data: st.DataObject) -> None:
    """Replicas may be read in another order, but the nearest ones only, and each byte once."""
    source, engine = made.source(), made.engine()
    reshard, pairs = Reshard(source, "e0", engine), pair(made.trainers_layout(), engine)
    assert pairs
    for rank, near in enumerate(made.near):
        found, wanted = pairs.reads(rank, near).whole(), reshard.reads(rank, near, start=0)
        if not pairs.has_replicas:
            assert by_trainer(found) == by_trainer(wanted)
            continue
        expected = made.expected(rank)
        target, written = np.full_like(expected, PAD), np.zeros_like(expected)
        run(found.copies(*made.addresses(rank)), made.source_line(), target, written)
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(written, made.live_bytes(rank))
        assert distances(found, near) == distances(wanted, near)


def distances(reads: Reads, near: Sequence[int]) -> Counter[int]:
    """How many bytes come from how far."""
    found = Counter[int]()
    for trainer, nbytes in reads.by_trainer().items():
        found[near[trainer]] += nbytes
    return found


@pytest.mark.parametrize(("num_turns", "busiest"), [(64, 1.3), (2, 2.5)])
def test_replicas_are_all_read(num_turns: int, busiest: float) -> None:
    """Four ranks cut each tensor, and sixteen hold each part."""
    metas = tuple(
        TensorMeta(f"{layer}.{name}", "bfloat16", shape)
        for layer in range(64)
        for name, shape in SHAPES.items()
    )
    source = joined([rows(metas, rank % 4, 4) for rank in range(64)])
    engine = Layout.from_ranks([fused(metas, rank, 2) for rank in range(2)])
    with mock.patch.object(alike, "MOST_TURNS", num_turns):
        pairs = pair(source, engine)
    assert pairs
    total = Counter[int]()
    for rank in range(2):
        total.update(pairs.reads(rank, [2] * 64).by_trainer())
    even = sum(meta.nbytes for meta in metas) / 64
    assert max(total.values()) < busiest * even if num_turns == 64 else max(total.values()) > busiest * even
    near = [0 if trainer in range(8, 12) else 2 for trainer in range(64)]
    assert {*pairs.reads(0, near).by_trainer()} <= {*range(8, 12)}, "the nearest ones are read"


def test_only_tensors_with_replicas_are_read_in_turns() -> None:
    """Norms are whole on each of 3 ranks, which cut all other tensors by rows."""
    ranks = []
    for rank in range(3):
        cut_, whole = rows(METAS, rank, 3).segments, rows(METAS, 0, 1).segments
        held = [w if w.tensor.endswith("norm") else c for c, w in zip(cut_, whole, strict=True)]
        ranks.append(RankLayout(tuple(METAS), tuple(held)))
    source, engine = joined(ranks), Layout.from_ranks([fused(METAS, 0, 1)])
    pairs = pair(source, engine)
    assert pairs
    found, wanted = pairs.reads(0, [2] * 3), Reshard(source.whole, "e0", engine).reads(0, [2] * 3, start=0)
    assert len(pairs.kinds.first) == 2 + 3, "gate and up are of one kind"
    assert len(found.reads) == 3 + 2 + 3, "thirds of gate, halves of down, and a norm of each rank"
    assert len(found) == len(wanted)
    every = found.whole()
    pairs_read = zip(every.trainer.tolist(), every.src_buffer.tolist(), strict=True)
    times = Counter(trainer for trainer, buffer in pairs_read if every.src_names[buffer].endswith("norm"))
    assert times == {1: 3, 2: 3 + 3}, "each of 9 once; rank 2 has no rows of down, so it takes the first turn"


@given(models(), st.data())
def test_what_is_near_is_read_in_turns_from_the_first_on(model: Model, data: st.DataObject) -> None:
    pairs, reshard = pair(model.trainers, model.engine), Reshard(model.source, "e0", model.engine)
    assert pairs
    trainers = data.draw(st.lists(st.integers(0, len(model.near) - 1), min_size=1, unique=True))
    first = data.draw(st.integers(0, len(model.near)))
    for rank in range(model.engine.num_ranks):
        its = pairs.reads(rank, model.near)
        local = LocalReads.of(its, trainers, first)
        local, common = pickle.loads(pickle.dumps((local, Alike.of(its))))
        (found,) = local.whole(common)
        whole = reshard.reads(rank, model.near, start=0)
        wanted = whole.take(np.flatnonzero(np.isin(whole.trainer, trainers)))
        assert by_trainer(found) == by_trainer(wanted)
        turns = [(trainer < first, trainer) for trainer in found.trainer.tolist()]
        assert turns == sorted(turns), "what is small is read in one round"
        assert pairs.reads(rank, model.near).by_trainer() == whole.by_trainer()


def lanes(model: Model, needs: Mapping[int, Needs], hosts: Mapping[int, str]) -> list[Lane]:
    """The messages of all members, each as its sender and as its receiver plans them."""
    num_trainers = model.source.num_ranks
    parts = CrossHostParts(range(num_trainers + len(needs)), range(num_trainers), needs, hosts, {}, 1 << 16)
    sent: dict[tuple[int, int], bytes] = {}
    received, found = {}, []
    for rank in range(num_trainers + len(needs)):
        place = parts.terms.place(rank)
        table = parts.received(place[0].kind, place[1]) if place else None
        terms, packs, table = pickle.loads(pickle.dumps((parts.terms, parts.sent(rank), table)))
        plan = terms.plan(rank, packs, table)
        sends, receives = plan.digests(rank)
        sent |= {(rank, to): digest for to, digest in sends.items()}
        received |= {(of, rank): digest for of, digest in receives.items()}
        found += plan.receives(rank)
    assert sent == received
    return found


@given(models(), st.data())
def test_messages_of_kinds_are_those_of_all_tensors(model: Model, data: st.DataObject) -> None:
    first, size = model.source.num_ranks, model.engine.num_ranks
    pairs, reshard = pair(model.trainers, model.engine), Reshard(model.source, "e0", model.engine)
    assert pairs
    given_, wanted = {}, {}
    for number in range(size):
        kinds, whole = pairs.reads(number, model.near), reshard.reads(number, model.near, start=0)
        if len(whole):
            given_ |= {first + number: kinds, first + size + number: kinds}
            wanted |= {first + number: whole, first + size + number: whole}
    hosts = {rank: data.draw(st.sampled_from("ab")) for rank in given_}
    order = {rank: number for number, rank in enumerate(sorted(given_))}
    given_, wanted, hosts = ({first + order[r]: v for r, v in its.items()} for its in (given_, wanted, hosts))
    assert [*map(shown, lanes(model, given_, hosts))] == [*map(shown, lanes(model, wanted, hosts))]
    with mock.patch.object(host_bundles, "LEAST_SHARE_NBYTES", data.draw(st.sampled_from([1, 64]))):
        shared = lanes(model, given_, hosts)
    for rank, reads in wanted.items():
        its = [lane.messages.reads for lane in shared if lane.receiver == rank]
        assert written(its) == written([reads])


def shown(lane: Lane) -> tuple[object, ...]:
    reads = [column.tolist() for column in columns(lane.messages.reads).values()]
    return lane.sender, lane.receiver, lane.bundle, lane.hop, lane.messages.wire.tolist(), *reads


def written(parts: Sequence[Reads]) -> Counter[tuple[int, ...]]:
    """Each byte that is written, and what it is read from."""
    found: Counter[tuple[int, ...]] = Counter()
    for reads in parts:
        for row in zip(*(column.tolist() for column in columns(reads).values()), strict=True):
            src, dst, rows, nbytes, src_pitch, dst_pitch, *places = row
            found.update(
                (src + r * src_pitch + b, dst + r * dst_pitch + b, *places)
                for r in range(rows)
                for b in range(nbytes)
            )
    return found


SHAPES = {"gate": (24, 4), "up": (24, 4), "norm": (6,), "down": (4, 24)}
METAS = [
    TensorMeta(f"{layer}.{name}", "bfloat16", shape) for layer in range(9) for name, shape in SHAPES.items()
]


def rows(metas: Sequence[TensorMeta], rank: int, size: int) -> RankLayout:
    segments = []
    for meta in metas:
        most = -(-meta.shape[0] // size)
        start = min(most * rank, meta.shape[0])
        box = Box((start, *(0 for _ in meta.shape[1:])), (min(most, meta.shape[0] - start), *meta.shape[1:]))
        segments.append(Segment(meta.name, box, meta.name, 0, box.strides(2)))
    return RankLayout(tuple(metas), tuple(segments))


def fused(metas: Sequence[TensorMeta], rank: int, size: int) -> RankLayout:
    """An engine that has gate and up of each layer in one parameter."""
    layout, taken = rows(metas, rank, size), {}
    segments = []
    for each in layout.segments:
        layer, name = each.tensor.split(".")
        buffer = f"{layer}.gate_up" if name in ("gate", "up") else each.tensor
        segments.append(Segment(each.tensor, each.box, buffer, taken.get(buffer, 0), each.strides))
        taken[buffer] = taken.get(buffer, 0) + each.box.numel * 2
    return RankLayout(tuple(metas), tuple(segments))


def test_layers_are_alike_though_they_are_elsewhere() -> None:
    source = joined([rows(METAS, rank, 5) for rank in range(5)])
    engine = Layout.from_ranks([fused(METAS, rank, 2) for rank in range(2)])
    pairs = pair(source, engine)
    assert pairs
    assert len(pairs.kinds.first) == 3, "gate and up are of one kind, wherever an engine has them"
    found = pairs.reads(1, [2] * 5)
    assert len(found.reads) < len(found.whole()) / 8
    assert by_trainer(found.whole()) == by_trainer(
        Reshard(source.whole, "e0", engine).reads(1, [2] * 5, start=0)
    )


@pytest.mark.parametrize("kept", [5, 0])
def test_few_alike_are_planned_one_by_one(kept: int) -> None:
    metas = METAS[:kept] + METAS[-4:]
    source = joined([rows(metas, rank, 2) for rank in range(2)])
    assert pair(source, source.whole, least=4) is None
    assert AlikeReshard.of(source, "e0", source.whole, frozenset(source.whole.names)) is None


def test_one_memory_of_many_tensors_is_no_kind() -> None:
    """As a flat buffer of all parameters: its reads are joined across tensors."""
    metas = METAS[:8]
    layout = rows(metas, 0, 1)
    ends = np.cumsum([0, *(meta.nbytes for meta in metas)]).tolist()
    flat = tuple(
        Segment(s.tensor, s.box, "flat", at, s.strides) for s, at in zip(layout.segments, ends, strict=False)
    )
    source = joined([RankLayout(tuple(metas), flat)])
    engine = Layout.from_ranks([layout])
    pairs = pair(source, engine)
    assert pairs
    assert len(pairs.kinds.buffer) == 1
    assert by_trainer(pairs.reads(0, [2]).whole()) == by_trainer(
        Reshard(source.whole, "e0", engine).reads(0, [2], start=0)
    )
