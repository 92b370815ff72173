"""An adapter that arrives in a receive buffer gets to its places in a slot, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel_doubles import CopyTable, use_doubles
from tests.unit.engines.test_live import build
from weightsync.engines.loading.live_writer import LiveWriter
from weightsync.engines.lora import receive_buffer
from weightsync.engines.lora.receive_buffer import ReceiveBuffer, SlotSink
from weightsync.memory.tensors import byte_strides, segment_view
from weightsync.plan import Box, Layout, RankLayout, Segment, TensorMeta
from weightsync.plan.layout.coverage import check_live

SIDES = st.integers(1, 9)


@st.composite
def slots(draw: st.DrawFn) -> tuple[RankLayout, dict[str, torch.Tensor]]:
    """Draw a slot: matrices of the largest rank, of which an adapter fills a corner."""
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    metas, segments, live = [], [], {}
    for number in range(draw(st.integers(1, 4))):
        rows, columns, top, left = draw(SIDES), draw(SIDES), draw(st.integers(0, 3)), draw(st.integers(0, 3))
        held = torch.zeros(
            top + rows + draw(SIDES), left + columns + draw(SIDES), dtype=getattr(torch, dtype)
        )
        metas.append(TensorMeta(f"{number}", dtype, (rows, columns)))
        strides = byte_strides(held)
        offset = top * strides[0] + left * strides[1]
        segments.append(
            Segment(f"{number}", Box((0, 0), (rows, columns)), f"stack {number}", offset, strides)
        )
        live[f"stack {number}"] = held
    return RankLayout(tuple(metas), tuple(segments)), live


@given(slots())
def test_each_box_gets_to_its_place(slot: tuple[RankLayout, dict[str, torch.Tensor]]) -> None:
    layout, live = slot
    received = ReceiveBuffer(layout, torch.device("cpu"))
    (memory,) = received.live.values()
    memory.copy_(torch.arange(1, len(memory) + 1))
    copies = received.copies_to(layout, live)
    CopyTable(copies, (0, len(copies))).launch(0, None)
    for held, segment in zip(received.layout.segments, layout.segments, strict=True):
        wanted = segment_view(memory, held)
        assert torch.equal(segment_view(live[segment.buffer], segment), wanted)
        assert int(live[segment.buffer].count_nonzero()) == wanted.numel(), "the rest of the slot stays zero"


@given(slots())
def test_it_is_written_once_and_whole(slot: tuple[RankLayout, dict[str, torch.Tensor]]) -> None:
    received = ReceiveBuffer(slot[0], torch.device("cpu"))
    check_live("e", Layout.from_ranks([received.layout]))


def test_a_byte_of_a_slot_that_changes_before_its_digest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)
    monkeypatch.setattr(receive_buffer, "CopyTable", CopyTable)
    plan, (layout,) = build(1, 1, 1)
    slot = {buffer.name: torch.zeros(buffer.shape) for buffer in layout.buffers}
    received = ReceiveBuffer(layout, torch.device("cpu"))
    writer = LiveWriter(plan, received.layout, received.live, [])
    sink = SlotSink(plan, received, writer, layout, slot, [])
    (memory,) = received.live.values()
    memory.normal_()
    sink.written()
    sink.finish()
    right = sink.digests()
    assert (writer.digests() == right).all()
    slot["norm"].view(torch.int32)[0] ^= 1
    assert (sink.digests() != right).sum() == 1
