"""A holder digests what its direct copies write, part by part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightsync.holder import direct_copy
from weightsync.holder.direct_copy import DirectCopy
from weightsync.memory.device import export_tensors
from weightsync.memory.digests import tensor_digest
from weightsync.memory.tensors import meta_of
from weightsync.plan import Layout, Members, RankLayout, Reshard, Segment, make_plan
from weightsync.plan.plan import by_tensor

pytestmark = pytest.mark.gpu

SHAPES = {f"w{i}": (300 + i, 64 * (i % 5 + 1)) for i in range(40)} | {"small": (7,), "flat": (1 << 20,)}


@pytest.mark.parametrize("group_nbytes", [1 << 20, 1 << 30], ids=["many groups", "one group"])
def test_digests_follow_the_copies(monkeypatch: pytest.MonkeyPatch, group_nbytes: int) -> None:
    monkeypatch.setattr(direct_copy, "GROUP_NBYTES", group_nbytes)
    source = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    target = {name: torch.zeros_like(each) for name, each in source.items()}
    metas = tuple(meta_of(name, each) for name, each in source.items())
    rank = RankLayout(metas, tuple(map(Segment.whole, metas)), buffers=metas)
    layout = Layout.from_ranks([rank])
    plan = make_plan(
        layout,
        {"e": layout},
        Members(num_holders=1, trainers=(0,), engines=(("e", (0,)),)),
        bucket_bytes=1 << 20,
        max_staging_bytes=1 << 30,
        slots=2,
        epoch=1,
    )
    reads = Reshard(layout, "e", layout).reads(0, [0])
    memory = {(0, name): handle for name, handle in export_tensors(source).items()}
    address = {name: each.data_ptr() for name, each in target.items()}
    copy = DirectCopy(plan, by_tensor(plan, rank), [reads], memory, address, digests=True)
    stream = torch.cuda.Stream()
    for version in (1, 2, 3):
        for each in source.values():
            each.normal_()
        torch.cuda.synchronize()
        live = copy.begin(stream, frozen=True)
        stream.synchronize()
        assert live
        wanted = [tensor_digest(source[meta.name].cpu(), meta.shape) for meta in plan.tensors]
        np.testing.assert_array_equal(live.result().wholes, np.array(wanted, np.uint64), str(version))
        assert all(target[name].equal(each) for name, each in source.items())
    copy.close()
    part = DirectCopy(plan, by_tensor(plan, rank), [reads.take(np.arange(3))], memory, address, digests=True)
    assert part.begin(stream, frozen=True) is None, "the rank holds more than is copied"
    stream.synchronize()
    part.close()
