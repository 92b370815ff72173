"""Which ranks hold the same boxes: the numbers, against sets of boxes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.plan.broadcast.held_boxes import held_boxes
from weightsync.plan.broadcast.plan import by_tensor
from weightsync.plan.layout.column import number_rows
from weightsync.plan.layout.draft import DRAFT
from weightsync.plan.layout.layout_table import LayoutTable

SHAPES: dict[str, tuple[int, ...]] = {"cut": (4, 2), "line": (3,), "scalar": (), DRAFT + "own": (2,)}
METAS = tuple(TensorMeta(name, "float32", shape) for name, shape in SHAPES.items())
WHOLE = RankLayout(METAS, tuple(map(Segment.whole, METAS)), (("tied", "line"),))
PARTS = [Segment("cut", Box((row, 0), (1, 2)), "cut", 0, (8, 4)) for row in range(4)] + [
    Segment("cut", Box((0, 0), (2, 2)), "cut", 0, (8, 4)),
    Segment("cut", Box((1, 0), (0, 2)), "cut", 0, (8, 4)),
    Segment("line", Box((0,), (3,)), "line", 0, (4,)),
    Segment("line", Box((1,), (2,)), "line", 0, (4,)),
    Segment("line", Box((0,), (0,)), "line", 0, (4,)),
    Segment("tied", Box((1,), (2,)), "tied", 0, (4,)),
    Segment("scalar", Box((), ()), "scalar", 0, ()),
    Segment("own", Box((0,), (2,)), "own", 0, (4,)),
    Segment("left out", Box((0,), (2,)), "left out", 0, (4,)),
]
RANKS = st.lists(st.lists(st.sampled_from(PARTS), max_size=6), min_size=1, max_size=4)


def plan() -> Plan:
    return make_plan(
        Layout.from_ranks([WHOLE]),
        {"e": Layout.from_ranks([WHOLE])},
        Members(2, (0,), (("e", (1,)),)),
        bucket_bytes=1 << 10,
        max_staging_bytes=1 << 12,
    )


PLAN = plan()


@given(RANKS)
def test_numbers_are_equal_where_sets_of_boxes_are(ranks: list[list[Segment]]) -> None:
    layouts = [replace(WHOLE, segments=tuple(segments)) for segments in ranks]
    found = held_boxes(PLAN, [LayoutTable.of(layout) for layout in layouts])
    assert found.shape == (len(ranks), len(PLAN.tensors))
    wanted = [
        [frozenset(segment.box for segment in segments) for segments in by_tensor(PLAN, layout)]
        for layout in layouts
    ]
    for tensor in range(len(PLAN.tensors)):
        for number, boxes in zip(found[:, tensor], wanted, strict=True):
            assert bool(number >= 0) is bool(boxes[tensor])
            same = [other[tensor] == boxes[tensor] for other in wanted]
            assert (found[:, tensor] == number).tolist() == same


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 1 << 62), st.just(7)), max_size=8))
def test_rows_are_numbered_in_their_order(rows: list[tuple[int, int, int]]) -> None:
    numbers = number_rows([*np.array(rows, np.int64).reshape(-1, 3).T])
    ordered = sorted(set(rows))
    assert numbers.tolist() == [ordered.index(row) for row in rows]
