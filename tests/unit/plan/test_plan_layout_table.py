"""Layouts in columns: what they give back, which are alike, and how they are joined."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.plan_strategies import World, worlds
from weightsync.errors import PlanError
from weightsync.plan import Box, RankLayout, Segment, Stage, TensorMeta, Unmatched
from weightsync.plan.layout.draft import Draft
from weightsync.plan.layout.layout import join_tables
from weightsync.plan.layout.layout_table import LayoutTable, MetaTable

NAMES = st.text(max_size=5)
PAIRS = st.tuples(NAMES, NAMES)
INTS = st.integers(-(1 << 63), (1 << 63) - 1)


def metas(dtypes: Sequence[str] = ("float32", "int8")) -> st.SearchStrategy[tuple[TensorMeta, ...]]:
    shapes = st.lists(st.integers(0, 300), max_size=4).map(tuple)
    return st.lists(st.builds(TensorMeta, NAMES, st.sampled_from(dtypes), shapes), max_size=5).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ndim = draw(st.integers(0, 4))
    numbers = st.lists(INTS, min_size=ndim, max_size=ndim).map(tuple)
    return Segment(draw(NAMES), Box(draw(numbers), draw(numbers)), draw(NAMES), draw(INTS), draw(numbers))


STAGES = st.builds(
    Stage,
    st.integers(0, 9),
    st.lists(NAMES, max_size=2).map(tuple),
    st.lists(st.builds(Unmatched, NAMES, NAMES, st.just(("near",))), max_size=2).map(tuple),
)
LAYOUTS = st.builds(
    RankLayout,
    metas(),
    st.lists(segments(), max_size=6).map(tuple),
    st.lists(PAIRS, max_size=3).map(tuple),
    metas(),
    st.lists(st.tuples(NAMES, INTS, INTS), max_size=3).map(tuple),
    NAMES,
    st.none() | STAGES,
    st.lists(NAMES, max_size=4).map(tuple),
    NAMES,
    metas(),
    st.none() | st.builds(Draft, NAMES, NAMES, *([st.integers(0, 9)] * 3), NAMES, NAMES),
)


@given(LAYOUTS)
def test_a_table_gives_its_layout_back(layout: RankLayout) -> None:
    sent = pickle.loads(pickle.dumps(LayoutTable.of(layout), protocol=5))
    assert sent.rank_layout() == layout


def test_a_rank_takes_what_its_checkpoint_stores_where_that_has_scales() -> None:
    full = TensorMeta("a.weight", "bfloat16", (8, 4)), TensorMeta("b", "bfloat16", (4,))
    stored = TensorMeta("a.weight", "int8", (8, 4)), TensorMeta("a.weight_scale", "float32", (8, 1)), full[1]
    draft = Draft("mtp", "a/draft", 1, 2, 0, "kind", "digest")
    layout = RankLayout(full, tuple(map(Segment.whole, full)), device="cuda:0", stored=stored, draft=draft)
    table = LayoutTable.of(layout)
    for names, takes in (({"a.weight", "b"}, False), ({meta.name for meta in stored}, True), (set(), False)):
        assert layout.takes_stored(names) == table.takes_stored(names) == takes
        assert layout.for_tensors(names) == (layout.as_stored() if takes else layout)
    assert table.as_stored().rank_layout() == layout.as_stored()
    assert (layout.as_stored().tensors, layout.as_stored().device) == (stored, "cuda:0")
    assert layout.as_stored().draft == draft
    assert not RankLayout(full, ()).takes_stored({meta.name for meta in stored})


@given(LAYOUTS, LAYOUTS)
def test_tables_are_alike_if_layouts_are_equal_but_for_devices_and_conversions(
    one: RankLayout, other: RankLayout
) -> None:
    table, aside = LayoutTable.of(one), {"device": "", "converts": "", "stored": (), "draft": None}
    assert table.alike(
        LayoutTable.of(replace(one, device="cuda:other", converts="all", stored=(), draft=None))
    )
    assert table.alike(LayoutTable.of(other)) == (replace(one, **aside) == replace(other, **aside))


W = TensorMeta("w", "int8", (300, 2))
ROW = Segment("w", Box((1, 0), (2, 2)), "w", 2, (2, 1))
WHOLE = RankLayout((W,), (ROW,), (("v", "w"),), (W,), (("w", 0, 1),), "cuda:0", Stage(1), ("w",))


@pytest.mark.parametrize(
    "changed",
    [
        replace(WHOLE, tensors=(replace(W, shape=(2, 300)),)),
        replace(WHOLE, tensors=(replace(W, dtype="uint8"),)),
        replace(WHOLE, segments=(replace(ROW, byte_offset=256 + 2),)),
        replace(WHOLE, segments=(replace(ROW, tensor="v"),)),
        replace(WHOLE, segments=(replace(ROW, box=Box((0, 1), (2, 2))),)),
        replace(WHOLE, segments=(ROW, ROW)),
        replace(WHOLE, tied=()),
        replace(WHOLE, buffers=()),
        replace(WHOLE, padding=(("w", 1, 0),)),
        replace(WHOLE, stage=None),
        replace(WHOLE, frozen=()),
    ],
)
def test_every_part_of_a_layout_counts(changed: RankLayout) -> None:
    assert not LayoutTable.of(WHOLE).alike(LayoutTable.of(changed))


def test_equal_numbers_of_different_widths_are_not_mistaken_for_one_another() -> None:
    """One number of two bytes has the bytes of two numbers of one."""
    one, two = (replace(WHOLE, frozen=(), tied=(), padding=(("w", n, 0),)) for n in (513, 1))
    assert b"".join(LayoutTable.of(one).memory_content()) != b"".join(LayoutTable.of(two).memory_content())


def test_a_table_is_small() -> None:
    """Ranks send one each: per segment some 20 bytes, and names are compressed."""
    names = [f"model.layers.{i}.mlp.experts.{j}.down_proj.weight" for i in range(30) for j in range(32)]
    tensors = tuple(TensorMeta(name, "bfloat16", (4096, 1024)) for name in names)
    layout = RankLayout(tensors, tuple(map(Segment.whole, tensors)), buffers=tensors)
    assert len(pickle.dumps(LayoutTable.of(layout), protocol=5)) < 60 * len(names)


def test_numbers_of_a_segment_that_do_not_fit_together_name_it() -> None:
    for tensors, wanted in (((W,), r"2 numbers, for shape \(300, 2\)"), ((), "as its tensor has dimensions")):
        with pytest.raises(
            PlanError, match=rf"^w: offset \(1, 0\), extent \(2, 2\), strides \(1,\):.*{wanted}"
        ):
            LayoutTable.of(RankLayout(tensors, (replace(ROW, strides=(1,)),)))


def expected(ranks: Sequence[RankLayout]) -> dict[str, object]:
    """Columns of a joined layout, segment by segment."""
    tied = {alias for layout in ranks for alias, _ in layout.tied}
    metas = {meta.name: meta for layout in reversed(ranks) for meta in layout.tensors}
    names = dict.fromkeys(m.name for layout in ranks for m in layout.tensors if m.name not in tied)
    rows = [(rank, each) for rank, layout in enumerate(ranks) for each in layout.segments]
    buffers = [*dict.fromkeys(each.buffer for _, each in rows)]
    live = [(rank, meta) for rank, layout in enumerate(ranks) for meta in layout.buffers]
    ndim = max([1, *(len(metas[name].shape) for name in names)])

    def wide(numbers: Sequence[int], fill: int) -> list[int]:
        return [*numbers, *[fill] * (ndim - len(numbers))]

    return {
        "tensors": tuple(metas[name] for name in names),
        "tied": tuple(sorted({pair for layout in ranks for pair in layout.tied})),
        "num_ranks": len(ranks),
        "tensor": [[*names].index(each.tensor) for _, each in rows],
        "rank": [rank for rank, _ in rows],
        "offset": [wide(each.box.offset, 0) for _, each in rows],
        "extent": [wide(each.box.extent, 1) for _, each in rows],
        "buffer": [buffers.index(each.buffer) for _, each in rows],
        "buffer_names": tuple(dict.fromkeys([*buffers, *(meta.name for _, meta in live)])),
        "byte_offset": [each.byte_offset for _, each in rows],
        "strides": [wide(each.strides, 0) for _, each in rows],
        "names": tuple(names),
        "frozen": frozenset(name for layout in ranks for name in layout.frozen),
    }


@given(worlds(), st.data())
def test_tables_are_joined_as_segment_by_segment(world: World, data: st.DataObject) -> None:
    tied = data.draw(st.sampled_from([(), (("head", "embed"),)]))
    frozen = tuple(data.draw(st.sets(st.sampled_from([meta.name for meta in world.tensors]))))
    for members in (world.trainers, *world.engines.values()):
        ranks = [rank.layout(world.tensors, tied) for rank in members]
        all_names = frozenset(meta.name for meta in world.tensors)
        # The first rank declares all tensors, others may leave out some.
        known = [all_names, *(data.draw(st.sets(st.sampled_from(sorted(all_names)))) for _ in ranks[1:])]
        ranks = [
            replace(
                layout,
                tensors=tuple(meta for meta in layout.tensors if meta.name in its),
                frozen=tuple(name for name in frozen if name in its),
            )
            for layout, its in zip(ranks, known, strict=True)
        ]
        joined = join_tables([LayoutTable.of(layout) for layout in ranks])
        for name, wanted in expected(ranks).items():
            found = getattr(joined, name)
            if isinstance(found, np.ndarray):
                assert found.dtype == (np.int32 if name in ("tensor", "rank", "buffer") else np.int64)
                found = found.tolist()
            assert found == wanted, name
        live = [(rank, meta) for rank, layout in enumerate(ranks) for meta in layout.buffers]
        assert joined.live.metas == tuple(live)
        assert len(joined.live.pad_nbytes) == sum(bool(row[2]) for each in ranks for row in each.padding)


def test_every_field_of_a_layout_is_in_its_table() -> None:
    held = {field.name for field in fields(LayoutTable)} - {"listed", "stated"} | {"segments"}
    assert {field.name for field in fields(RankLayout)} <= held


def test_equal_declarations_of_ranks_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of FSDP declare the same tensors, those of an engine the same parameters."""
    decoded: list[int] = []
    real = MetaTable.metas

    def metas(table: MetaTable, names: Sequence[str]) -> tuple[TensorMeta, ...]:
        decoded.append(len(table))
        return real(table, names)

    monkeypatch.setattr(MetaTable, "metas", metas)
    rows = [Segment("w", Box((row, 0), (1, 2)), "w", 0, (2, 1)) for row in range(300)]
    live = TensorMeta("w", "int8", (1, 2))
    ranks = [RankLayout((W,), (row,), buffers=(live,), device=f"cuda:{i}") for i, row in enumerate(rows)]
    joined = join_tables([LayoutTable.of(rank) for rank in ranks])
    assert decoded == [1, 1]
    assert joined.tensors == (W,)
    assert joined.live.metas == tuple((rank, live) for rank in range(300))
    assert joined.segments(299) == (rows[299],)
