"""Direct plans: carried out on plain bytes they are gather-then-slice, from the nearest and evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import PAD, cuts
from tests.unit.plan.reshard_strategies import (
    TIED,
    Sides,
    nbytes_by_near,
    reads_by_near,
    run,
    sides,
    tilings,
)
from weightsync.errors import PlanError
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.direct.direct import CHUNK_NBYTES, Reads, Reshard, same_dtype_tensors
from weightsync.plan.layout.copies import stable_order
from weightsync.plan.layout.coverage import check_live


@given(sides())
def test_what_is_carried_out_equals_gather_then_slice(made: Sides) -> None:
    check_live("e0", made.engine())
    reshard = made.reshard()
    for rank, near in enumerate(made.near):
        reads = reshard.reads(rank, near)
        expected = made.expected(rank)
        target, written = np.full_like(expected, PAD), np.zeros_like(expected)
        run(reads.copies(*made.addresses(rank)), made.source_line(), target, written)
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(written, made.live_bytes(rank))
        assert reads.nbytes == written.sum() == sum(reads.by_trainer().values())
        assert (np.minimum(reads.src_pitch, reads.dst_pitch) >= reads.row_nbytes).all()


@given(sides())
def test_each_byte_comes_from_the_nearest_that_holds_it(made: Sides) -> None:
    reshard = made.reshard()
    for rank, near in enumerate(made.near):
        assert reads_by_near(made, rank, reshard.reads(rank, near)) == nbytes_by_near(made, rank)


@given(tilings())
def test_any_tiling_to_any_other(made: Sides) -> None:
    check_live("e0", made.engine())
    expected = made.expected(0)
    target, written = np.full_like(expected, PAD), np.zeros_like(expected)
    reads = made.reshard().reads(0, made.near[0])
    run(reads.copies(*made.addresses(0)), made.source_line(), target, written)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(written, made.live_bytes(0))


@given(sides(), st.data())
def test_only_some_tensors(made: Sides, data: st.DataObject) -> None:
    names = [meta.name for meta in made.engine().tensors]
    only = data.draw(st.sets(st.sampled_from(names)))
    reads = made.reshard(only=only).reads(0, made.near[0])
    sizes = {meta.name: meta.itemsize for meta in made.tensors}
    segments = [segment for segment in made.ranks[0].segments if segment.tensor in only]
    assert reads.nbytes == sum(each.box.numel * sizes[each.tensor] for each in segments)
    buffers = {each.buffer for each in segments if each.box.numel}
    assert {reads.dst_names[number] for number in reads.dst_buffer.tolist()} == buffers


@given(sides())
def test_the_same_layouts_give_the_same_reads(made: Sides) -> None:
    one, other = (made.reshard().reads(0, made.near[0]) for _ in range(2))
    for name in ("trainer", "src_buffer", "src", "dst_buffer", "dst", "rows", "row_nbytes", "src_pitch"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# --- what is refused ---------------------------------------------------------------------------------


@given(sides(), st.sampled_from([1, 3]))
def test_reads_are_the_same_however_many_boxes_are_worked_on_at_once(made: Sides, at_once: int) -> None:
    num_trainers = len(made.trainers)
    near = [trainer % 3 for trainer in range(num_trainers)]
    for rank in range(len(made.ranks)):
        wanted = made.reshard().reads(rank, near)
        with mock.patch.multiple("weightsync.plan.direct.direct", _AT_ONCE=at_once):
            found = made.reshard().reads(rank, near)
        assert np.array_equal(found.table(), wanted.table())
        for name in ("trainer", "src_buffer", "dst_buffer"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name))


def test_numbers_too_large_to_sort_with_their_places_keep_their_order_too() -> None:
    small = np.array([3, 1, 3, 1, 0], np.int64)
    assert stable_order(small).tolist() == stable_order(small << 60).tolist() == [4, 1, 3, 0, 2]
    assert stable_order(small[:0]).tolist() == []


@given(sides(), st.data())
def test_a_hole_at_the_trainers_is_refused_by_name(made: Sides, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(made.trainers))
    held = [i for i, s in enumerate(rank.segments) if s.box.numel]
    assume(held)
    gone = rank.segments[data.draw(st.sampled_from(held))]
    for each in made.trainers:  # replicas, too
        each.segments[:] = [s for s in each.segments if (s.tensor, s.box) != (gone.tensor, gone.box)]
    with pytest.raises(PlanError, match="no trainer holds") as caught:
        made.reshard()
    assert gone.tensor in (caught.value.parameter, dict([TIED]).get(caught.value.parameter))


@given(sides(), st.data())
def test_an_overlap_at_the_trainers_is_refused_by_name(made: Sides, data: st.DataObject) -> None:
    """One more box that starts where another does, and is one row shorter."""
    rank = data.draw(st.sampled_from(made.trainers))
    tall = [s for s in rank.segments if s.box.numel and s.box.ndim and s.box.extent[0] > 1]
    assume(tall)
    twice = data.draw(st.sampled_from(tall))
    box = Box(twice.box.offset, (twice.box.extent[0] - 1, *twice.box.extent[1:]))
    rank.segments.append(replace(twice, box=box))
    with pytest.raises(PlanError, match="different boxes hold") as caught:
        made.reshard()
    assert twice.tensor in (caught.value.parameter, dict([TIED]).get(caught.value.parameter))


def two_sides(ours: list[TensorMeta], theirs: list[TensorMeta]) -> tuple[Layout, Layout]:
    def whole(metas: list[TensorMeta]) -> Layout:
        columns = Layout.from_columns(
            tensors=tuple(metas),
            num_ranks=1,
            tensor=np.arange(len(metas), dtype=np.int32),
            rank=np.zeros(len(metas), np.int32),
            offset=np.zeros((len(metas), 2), np.int64),
            extent=np.array([meta.shape for meta in metas], np.int64),
        )
        return columns

    return whole(ours), whole(theirs)


A, B = TensorMeta("a", "bfloat16", (4, 6)), TensorMeta("b", "bfloat16", (2, 3))


@pytest.mark.parametrize(
    ("ours", "theirs", "name", "says"),
    [
        ([A], [A, B], "b", "no trainer or checkpoint declares it"),
        ([A, B], [A], "b", "but no engine has it"),
        ([A, B], [A, replace(B, shape=(3, 2))], "b", r"shape \(2, 3\) at the source, \(3, 2\)"),
        ([A, B], [A, replace(B, dtype="float32")], "b", "bfloat16 at the trainers, float32 at the engine"),
    ],
)
def test_sides_that_do_not_fit(ours, theirs, name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        Reshard(*in_order(ours, theirs))
    assert caught.value.parameter == name


def in_order(ours: list[TensorMeta], theirs: list[TensorMeta]) -> tuple[Layout, str, Layout]:
    source, engine = two_sides(ours, theirs)
    return source, "e0", engine


def test_a_tensor_that_is_cast_goes_another_way() -> None:
    args = in_order([A, B], [A, replace(B, dtype="float32")])
    names, reasons = same_dtype_tensors(*args)
    assert (names, set(reasons)) == ({"a"}, {"b"})
    assert reasons["b"] == "bfloat16 at the trainers, float32 at the engine"
    assert Reshard(*args, only=names).reads(0, [0]).nbytes == A.nbytes
    with pytest.raises(PlanError, match="engine e0 takes no such tensor") as caught:
        Reshard(*args, only={"a", "c"})
    assert caught.value.parameter == "c"


# --- who is read, and when ---------------------------------------------------------------------------


def model(num_layers: int, experts: int) -> list[TensorMeta]:
    hidden, ffn = 256, 768
    shapes: dict[str, tuple[int, ...]] = {"embed": (8000, hidden), "head": (8000, hidden)}
    for layer in range(num_layers):
        shapes |= {f"{layer}.norm": (hidden,), f"{layer}.q": (1024, hidden), f"{layer}.o": (hidden, 1024)}
        for expert in range(experts):
            shapes |= {f"{layer}.{expert}.up": (ffn, hidden), f"{layer}.{expert}.down": (hidden, ffn)}
    return [TensorMeta(name, "bfloat16", shape) for name, shape in shapes.items()]


def meshed(metas: list[TensorMeta], shards: int, replicas: int, columns: tuple[str, ...] = ()) -> Layout:
    """Dim-0 shards (columns where the name says so), the same on each of `replicas` groups."""
    ranks = []
    for number in range(shards * replicas):
        segments = []
        for meta in metas:
            dim = 1 if meta.name.endswith(columns) and columns else 0
            offset, extent = [0] * len(meta.shape), list(meta.shape)
            offset[dim], extent[dim] = cuts(meta.shape[dim], shards)[number % shards]
            strides = (extent[-1] * 2, 2)[2 - len(extent) :]
            segments.append(Segment(meta.name, Box(tuple(offset), tuple(extent)), meta.name, 0, strides))
        ranks.append(RankLayout(tuple(metas), tuple(segments)))
    return Layout.from_ranks(ranks)


@pytest.mark.parametrize(
    ("shards", "replicas", "receivers", "num_engines"),
    [(4, 2, 8, 1), (4, 4, 8, 2), (1, 8, 4, 1), (1, 8, 1, 8), (2, 3, 4, 3)],
)
@pytest.mark.parametrize("experts", [1, 4])
def test_all_receivers_together_load_replicas_evenly(shards, replicas, receivers, num_engines, experts):
    metas = model(6, experts)
    reshard = Reshard(
        meshed(metas, shards, replicas), "e0", meshed(metas, receivers, num_engines, (".o", ".down"))
    )
    sent: Counter[int] = Counter()
    for rank in range(receivers * num_engines):
        sent.update(reshard.reads(rank, [1] * (shards * replicas)).by_trainer())
    loads = [sent[trainer] for trainer in range(shards * replicas)]
    assert max(loads) <= 1.1 * np.mean(loads)


def test_one_receiver_balances_what_it_reads() -> None:
    metas = model(6, 4)
    reads = Reshard(meshed(metas, 1, 4), "e0", meshed(metas, 1, 1)).reads(0, [1, 2, 1, 1])
    loads = reads.by_trainer()
    assert set(loads) == {0, 2, 3}
    assert max(loads.values()) <= 1.1 * np.mean(list(loads.values()))


def test_sources_take_turns_and_receivers_start_apart() -> None:
    metas = [TensorMeta(f"t{i}", "bfloat16", (1 << 15, 1024)) for i in range(8)]
    reshard = Reshard(meshed(metas, 4, 1), "e0", meshed(metas, 1, 4))
    everyone = [reshard.reads(rank, [1] * 4) for rank in range(4)]
    assert [int(reads.trainer[0]) for reads in everyone] == [0, 1, 2, 3]
    assert int(reshard.reads(0, [1, 1, 0, 1]).trainer[0]) == 3
    assert int(reshard.reads(0, [1] * 4, start=2).trainer[0]) == 2
    for reads in everyone:
        nbytes = reads.rows * reads.row_nbytes
        assert nbytes.max() <= CHUNK_NBYTES
        so_far = np.cumsum((reads.trainer[:, None] == np.arange(4)) * nbytes[:, None], axis=0)
        assert (so_far.max(axis=1) - so_far.min(axis=1)).max() <= CHUNK_NBYTES


# --- few copies --------------------------------------------------------------------------------------


def reads_of(meta: TensorMeta, held: Segment, taken: list[Segment]) -> Reads:
    source = Layout.from_ranks([RankLayout((meta,), (held,))])
    return Reshard(source, "e0", Layout.from_ranks([RankLayout((meta,), tuple(taken))])).reads(0, [0])


def rows_of(reads: Reads) -> list[tuple[int, int]]:
    return list(zip(reads.rows.tolist(), reads.row_nbytes.tolist(), strict=True))


EXPERTS = TensorMeta("w13", "bfloat16", (8, 12, 16))
WHOLE = Segment("w13", Box((0, 0, 0), (8, 12, 16)), "w13", 0, (384, 32, 2))


def taken(low: tuple[int, ...], extent: tuple[int, ...], at: int, strides: tuple[int, ...]) -> Segment:
    return Segment("w13", Box(low, extent), "live", at, strides)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        # whole experts
        ([taken((2, 0, 0), (3, 12, 16), 0, (384, 32, 2))], [(1, 1152)]),
        # half of the rows of gate and of up
        (
            [taken((0, 3 * i, 0), (8, 3, 16), 96 * (i // 2), (192, 32, 2)) for i in (0, 2)],
            [(8, 96), (8, 96)],
        ),
        # the same, expert by expert: all are equally far apart
        (
            [taken((i // 2, i % 2 * 6, 0), (1, 3, 16), 96 * i, (0, 32, 2)) for i in range(16)],
            [(16, 96)],
        ),
        # some columns of each row
        ([taken((0, 0, 4), (8, 12, 4), 0, (96, 8, 2))], [(96, 8)]),
        # some columns, expert by expert, last one first
        ([taken((e, 0, 4), (1, 12, 4), 96 * e, (0, 8, 2)) for e in range(7, -1, -1)], [(96, 8)]),
        # row by row
        ([taken((i // 12, i % 12, 0), (1, 1, 16), 32 * i, (0, 0, 2)) for i in range(96)], [(1, 3072)]),
        # column block by column block
        ([taken((0, 0, 4 * i), (8, 12, 4), 8 * i, (384, 32, 2)) for i in range(4)], [(1, 3072)]),
        # every third row to every second one
        ([taken((0, 3 * i, 0), (1, 1, 16), 64 * i, (0, 0, 2)) for i in range(4)], [(4, 32)]),
    ],
)  # fmt: skip
def test_few_copies(segments: list[Segment], expected: list[tuple[int, int]]) -> None:
    assert rows_of(reads_of(EXPERTS, WHOLE, segments)) == expected
