"""A loader's layout, changed to the experts that are in the slots now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync.engines.loading.arranged_experts import ExpertSlot, arranged
from weightsync.engines.loading.loader_trace import UnprovableError
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.coverage import check_live

GATE_UP, DOWN = TensorMeta("m.gate_up", "float32", (4, 6, 2)), TensorMeta("m.down", "float32", (4, 2, 3))
GATE = TensorMeta("m.gate", "float32", (4, 2))
W13, W2 = TensorMeta("w13", "float32", (2, 6, 2)), TensorMeta("w2", "float32", (2, 2, 3))
AS_LOADED = RankLayout(
    (GATE_UP, DOWN, GATE),
    (
        Segment("m.gate_up", Box((2, 0, 0), (2, 6, 2)), "w13", 0, (48, 8, 4)),
        Segment("m.down", Box((2, 0, 0), (2, 2, 3)), "w2", 0, (24, 12, 4)),
        Segment.whole(GATE),
    ),
    buffers=(W13, W2, GATE),
)


def at(*slots: ExpertSlot) -> RankLayout:
    made = arranged(AS_LOADED, "key", {"w13": slots, "w2": slots}, 4)
    check_live("e", Layout.from_ranks([made]))
    return made


def boxes(layout: RankLayout, buffer: str) -> list[tuple[int, int, int]]:
    """The first expert, how many follow it, and the first byte, of each segment of a buffer."""
    held = [each for each in layout.segments if each.buffer == buffer]
    return [(each.box.offset[0], each.box.extent[0], each.byte_offset) for each in held]


def test_experts_in_order_stay_one_box() -> None:
    layout = at(ExpertSlot(2, 0, 1), ExpertSlot(3, 0, 1))
    assert {*layout.segments} == {*AS_LOADED.segments}
    assert layout.arrangement
    assert layout.arrangement.copies == ()


def test_each_slot_has_the_expert_of_now() -> None:
    layout = at(ExpertSlot(3, 0, 1), ExpertSlot(0, 0, 1))
    assert boxes(layout, "w13") == [(3, 1, 0), (0, 1, 48)]
    assert boxes(layout, "w2") == [(3, 1, 0), (0, 1, 24)]
    assert boxes(layout, "m.gate") == [(0, 4, 0)]


def test_copies_are_boxes_of_their_own() -> None:
    layout = at(ExpertSlot(1, 1, 3), ExpertSlot(2, 0, 1))
    assert boxes(layout, "w13") == [(1, 1, 0), (2, 1, 48)]
    copies = layout.arrangement.copies  # type: ignore[union-attr]
    assert dict(zip(layout.segments, copies, strict=True)) == {
        each: (1, 3) if each.box.offset[0] == 1 else (0, 1) for each in layout.segments
    }
    twice = at(ExpertSlot(1, 0, 2), ExpertSlot(1, 1, 2))
    assert boxes(twice, "w2") == [(1, 1, 0), (1, 1, 24)]


def test_experts_with_tensors_of_their_own_are_refused() -> None:
    other = replace(AS_LOADED, tensors=(replace(GATE_UP, shape=(8, 6, 2)), DOWN, GATE))
    slots = [ExpertSlot(2, 0, 1), ExpertSlot(3, 0, 1)]
    with pytest.raises(UnprovableError, match=r"w13: m\.gate_up is no stack of 4 experts"):
        arranged(other, "key", {"w13": slots, "w2": slots}, 4)
    apart = replace(AS_LOADED.segments[0], strides=(96, 8, 4))
    with pytest.raises(UnprovableError, match=r"w13: m\.gate_up is not stored expert after expert"):
        arranged(replace(AS_LOADED, segments=(apart,)), "key", {"w13": slots}, 4)
