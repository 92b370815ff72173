"""What holders send out of a checkpoint that another process read, on the host and by way of a bounce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from weightsync.holder import send_buffer as mapped_send_buffer
from weightsync.holder.send_buffer import Bounce, MappedSendBuffer
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, TensorMeta, make_plan
from weightsync.sources.checkpoint.checkpoint_store import CheckpointStore

TENSORS = {
    "even": torch.arange(600.0).view(20, 30),
    "odd": torch.arange(7, dtype=torch.uint8),
    "last": torch.arange(101.0),
}
SENT = {"even": torch.bfloat16, "odd": torch.uint8, "last": torch.float32}
NUM_RANKS = 2


def plan_of(source: CheckpointStore) -> Plan:
    """Of all ranks to one engine, which holds `SENT`, in buckets that are smaller than the checkpoint."""
    metas = tuple(
        TensorMeta(name, str(dtype).removeprefix("torch."), tuple(TENSORS[name].shape))
        for name, dtype in SENT.items()
    )
    segments = tuple(
        Segment(
            meta.name,
            Box((0,) * len(meta.shape), meta.shape),
            meta.name,
            0,
            tuple(stride * meta.itemsize for stride in TENSORS[meta.name].stride()),
        )
        for meta in metas
    )
    return make_plan(
        Layout.from_ranks([source.layout(rank, NUM_RANKS) for rank in range(NUM_RANKS)]),
        {"e0": Layout.from_ranks([RankLayout(metas, segments)])},
        Members(NUM_RANKS + 1, tuple(range(NUM_RANKS)), (("e0", (NUM_RANKS,)),)),
        bucket_bytes=1024,
        max_staging_bytes=1 << 20,
    )


@pytest.mark.usefixtures("pageable")
@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("part_nbytes", [64, 4 << 20])
def test_every_rank_fills_its_pieces_of_every_bucket_in_the_dtype_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_nbytes: int, to_device: bool
) -> None:
    monkeypatch.setattr(mapped_send_buffer, "PART_NBYTES", part_nbytes)
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = CheckpointStore([str(tmp_path)])
    source.read()
    plan = plan_of(source)
    slots = {bucket: torch.zeros(1024, dtype=torch.uint8) for bucket in range(plan.num_buckets)}
    send_buffers = [MappedSendBuffer(plan, rank) for rank in range(NUM_RANKS)]
    for rank, send_buffer in enumerate(send_buffers):
        send_buffer.source("it", {"it": source.export(rank, NUM_RANKS)}, to_device)
        for bucket, slot in slots.items():
            send_buffer.fill(bucket, slot)
    saved = [torch.zeros(send_buffer.nbytes, dtype=torch.uint8) for send_buffer in send_buffers]
    for send_buffer, to in zip(send_buffers, saved, strict=True):
        send_buffer.save(to)
        send_buffer.close()
    assert len(slots) > 1
    for piece in (piece for bucket in plan.buckets() for piece in bucket.pieces):
        name = plan.tensors[piece.tensor].name
        wanted = TENSORS[name][piece.box.slices()].to(SENT[name]).flatten().view(torch.uint8)
        assert torch.equal(slots[piece.bucket][piece.offset : piece.offset + piece.nbytes], wanted)
        kept = saved[piece.trainer][piece.send_buffer_offset : piece.send_buffer_offset + piece.nbytes]
        assert torch.equal(kept, wanted)
    source.close()


class Part:
    def __init__(self, offset: int, data: torch.Tensor) -> None:
        self.offset, self.nbytes, self.data = offset, len(data), data

    def copy(self, target: torch.Tensor) -> None:
        target.copy_(self.data)


@pytest.fixture(scope="module")
def pageable() -> Iterator[None]:
    """Without a device no memory can be page-locked."""
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, pin_memory, **named: empty(*args, **named))
        yield


@pytest.mark.usefixtures("pageable")
@given(sizes=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), min_size=1, max_size=5))
def test_what_bounces_arrives_where_it_belongs(sizes: list[list[int]]) -> None:
    bounce = Bounce(2, max(sum(nbytes) + sum(range(len(nbytes))) for nbytes in sizes))
    for bucket, nbytes in enumerate(sizes):
        slot, wanted = torch.zeros(2, 3000, dtype=torch.uint8)
        parts, end = [], bucket  # where this rank's begin
        for number, each in enumerate(nbytes, start=1):
            parts.append(Part(end, torch.full((each,), number, dtype=torch.uint8)))
            wanted[end : end + each] = number
            end += each + number  # what lies between is another rank's
        bounce.send(bucket, parts, slot)
        assert torch.equal(slot, wanted)
    bounce.close()
