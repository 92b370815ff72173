"""A holder digests what its direct copies write, as it writes it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from weightsync.holder.direct_copy import DirectCopy
from weightsync.memory.device import export_tensors
from weightsync.memory.kernels.digests import BoxPart, box_digests
from weightsync.memory.tensors import byte_strides, meta_of
from weightsync.plan import Box, Layout, Members, RankLayout, Reshard, Segment, make_plan
from weightsync.plan.broadcast.plan import by_tensor

pytestmark = pytest.mark.gpu

SHAPES = {f"w{i}": (300 + i, 64 * (i % 5 + 1)) for i in range(40)} | {
    "small": (7,),
    "flat": (1 << 20,),
    "odd": (33, 7),
    "stack": (5, 64, 512),
}
MEMBERS = Members(num_holders=2, trainers=(0, 1), engines=(("e", (0,)),))


def cut(shape: tuple[int, ...], dim: int, part: int, num_parts: int) -> Box:
    """The `part`-th of about equal parts of a dimension; of a vector always its only one."""
    dim = min(dim, len(shape) - 1)
    each = -(-shape[dim] // num_parts)
    first = min(part * each, shape[dim])
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = first, min(each, shape[dim] - first)
    return Box(tuple(offset), tuple(extent))


def rank_of(whole: dict[str, torch.Tensor], held: dict[str, tuple[Box, torch.Tensor]]) -> RankLayout:
    metas = tuple(meta_of(name, each) for name, each in whole.items())
    segments = tuple(
        Segment(name, box, name, 0, byte_strides(memory)) for name, (box, memory) in held.items() if box.numel
    )
    buffers = tuple(meta_of(name, memory) for name, (box, memory) in held.items() if box.numel)
    return RankLayout(metas, segments, buffers=buffers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("trainer_dim", "engine_dim"),
    [(0, 0), (0, 1), (1, 0), (1, 1)],
    ids=["rows", "across", "into rows", "columns"],
)
@pytest.mark.parametrize("parts", [1, 2], ids=["whole", "half"])
def test_digests_are_of_what_the_copies_wrote(
    dtype: torch.dtype, trainer_dim: int, engine_dim: int, parts: int
) -> None:
    whole = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, shape in SHAPES.items()}
    trainers: list[dict[str, tuple[Box, torch.Tensor]]] = []
    for rank in (0, 1):
        boxes = {name: cut(shape, trainer_dim, rank, 2) for name, shape in SHAPES.items()}
        trainers.append(
            {name: (box, torch.zeros(box.extent, dtype=dtype, device="cuda")) for name, box in boxes.items()}
        )
    boxes = {name: cut(shape, engine_dim, 0, parts) for name, shape in SHAPES.items()}
    engine = {name: (box, torch.zeros(box.extent, dtype=dtype, device="cuda")) for name, box in boxes.items()}
    ranks = [rank_of(whole, held) for held in trainers]
    frozen = tuple(name for name in SHAPES if name.startswith("w1"))
    layout = Layout.from_ranks([replace(rank, frozen=frozen) for rank in ranks])
    target = rank_of(whole, engine)
    live = Layout.from_ranks([target])
    plan = make_plan(
        layout, {"e": live}, MEMBERS, bucket_bytes=1 << 20, max_staging_bytes=1 << 30, slots=2, epoch=1
    )
    reads = Reshard(layout, "e", live).reads(0, [0, 0])
    still = np.isin(reads.dst_buffer, [reads.dst_names.index(name) for name in frozen])
    memory = {
        (rank, name): handle
        for rank, held in enumerate(trainers)
        for name, handle in export_tensors({name: each for name, (_, each) in held.items()}).handles().items()
    }
    address = {name: each.data_ptr() for name, (_, each) in engine.items()}
    split = [reads.take(np.flatnonzero(~still)), reads.take(np.flatnonzero(still))]
    copy = DirectCopy(plan, by_tensor(plan, target), split, memory, address)
    stream = torch.cuda.Stream()
    for version in (1, 2, 3):
        for name, each in whole.items():
            if version == 1 or name not in frozen:
                each.copy_(torch.randint(0, 200, each.shape, device="cuda"))
            for held in trainers:
                box, memory_of = held[name]
                memory_of.copy_(each[box.slices()])
        torch.cuda.synchronize()
        found = copy.begin(stream, frozen=version == 1)
        stream.synchronize()
        assert found
        for name, (box, each) in engine.items():
            assert each.equal(whole[name][box.slices()]), name
        tensors = {meta.name: number for number, meta in enumerate(plan.tensors)}
        of_parts = [
            BoxPart(tensors[name], each.cpu(), SHAPES[name], box) for name, (box, each) in engine.items()
        ]
        wanted = box_digests(of_parts, len(tensors))
        np.testing.assert_array_equal(found.result().wholes, wanted, str(version))
    copy.close()
    some = DirectCopy(plan, by_tensor(plan, target), [reads.take(np.arange(3))], memory, address)
    assert some.begin(stream, frozen=True) is None, "the rank holds more than is copied"
    stream.synchronize()
    some.close()
