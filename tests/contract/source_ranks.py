"""Trainer ranks for the source suite: each publishes what it holds, after a forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weightsync.memory.host import SharedBuffer
from weightsync.plan import Box, Layout, Members, Plan, RankLayout, Segment, make_plan
from weightsync.plan.layout.layout_table import LayoutTable
from weightsync.protocol.messages import Attached, Compared, Digests, combine
from weightsync.sources.module import ModuleSource

ENGINE_DTYPE = {"head.weight": "bfloat16"}

Share = tuple[bytes, list[int]]
Case = tuple[str, int]
"""How the model is cut, and over how many ranks."""


class Model(nn.Module):
    """Tied weights, a persistent buffer, a scalar, and rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 8)
        self.block = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8))
        self.head = nn.Linear(8, 5, bias=False)
        self.tied = nn.Linear(8, 13, bias=False)
        self.tied.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(4.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.block(self.embed(ids)))
        return hidden


def engine_needs(layout: RankLayout) -> RankLayout:
    """Whole tensors, one of them in another dtype."""
    metas = tuple(
        type(meta)(meta.name, ENGINE_DTYPE.get(meta.name, meta.dtype), meta.shape) for meta in layout.tensors
    )
    whole = tuple(
        Segment(m.name, Box((0,) * len(m.shape), m.shape), m.name, 0, (1,) * len(m.shape)) for m in metas
    )
    return RankLayout(metas, whole, layout.tied)


def plan_for(layouts: Sequence[RankLayout], bucket_bytes: int = 512) -> Plan:
    """One engine on a holder of its own."""
    num_ranks = len(layouts)
    return make_plan(
        Layout.from_ranks(layouts),
        {"e0": Layout.from_ranks([engine_needs(layouts[0])])},
        Members(num_ranks + 1, tuple(range(num_ranks)), (("e0", (num_ranks,)),)),
        bucket_bytes=bucket_bytes,
        max_staging_bytes=16 * bucket_bytes + (1 << 20),
    )


def publish(
    source: ModuleSource, plan: Plan, rank: int, offload: bool = False, compared: list[Compared] | None = None
) -> tuple[Share, Digests]:
    """The send buffer's bytes after one publish; with `offload`, of a model that has no memory by then.

    `compared` takes what is said of boxes that other ranks hold, too.
    """
    send_buffer = SharedBuffer.create(plan.send_buffer_nbytes(rank))
    assert source.attach(plan, rank, send_buffer.handle) == Attached(plan.digest(), None)
    if offload:
        source.offload()
    digests = source.publish(True).digests
    share = (bytes(send_buffer.tensor.numpy()), digests.tolist())
    if compared is not None and plan.replicas:
        compared.append(source.compare_replicas(range(plan.replicas.num_rounds)))
    source.close()
    source.close()
    send_buffer.close()
    return share, digests


def shard(model: Model, kind: str, num_ranks: int) -> None:
    """Cut a model as `kind` says: FSDP2, replicas of it (HSDP), tensor parallelism, or all of them."""
    if kind == "plain":
        return
    shape = {"tp": 2 if "tp" in kind else 1, "replicate": 2 if "hsdp" in kind else 1}
    mesh = init_device_mesh(
        "cpu",
        (shape["replicate"], num_ranks // math.prod(shape.values()), shape["tp"]),
        mesh_dim_names=("replicate", "shard", "tp"),
    )
    if "tp" in kind:
        plan = {
            "block.0": ColwiseParallel(output_layouts=Replicate()),
            "block.1": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
    if "sd" in kind:
        over = mesh["replicate", "shard"] if "hsdp" in kind else mesh["shard"]
        fully_shard(model.block, mesh=over)
        fully_shard(model, mesh=over)


def run_ranks(rank: int, cases: Sequence[Case], meeting: str, results: Any) -> None:
    """One process: join the ranks of each case that has so many; rank 0 reports each case's plan and shares.

    A case that fails is reported as an error, and ends the process.
    """
    torch.set_num_threads(1)
    for number, (kind, num_ranks) in enumerate(cases):
        if rank >= num_ranks:
            continue
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}-{number}", rank=rank, world_size=num_ranks
        )
        try:
            found = _run(rank, kind, num_ranks)
        except Exception as error:
            results.put(((kind, num_ranks), RuntimeError(f"rank {rank}: {error!r}")))
            raise
        if rank == 0:
            results.put(((kind, num_ranks), found))
        dist.destroy_process_group()


def _run(rank: int, kind: str, num_ranks: int) -> tuple[Plan, list[Share]]:
    """Shard the model or not, use it, and publish it."""
    model = Model()
    shard(model, kind, num_ranks)
    offload = kind.startswith("offloaded")
    source = ModuleSource(model, offloads=offload)
    layouts: list[RankLayout] = [None] * num_ranks  # type: ignore[list-item]
    dist.all_gather_object(layouts, source.layout())
    outlines = [LayoutTable.of(layout).outline() for layout in layouts]
    assert len({each.key for each in outlines}) == 1
    assert all(bool(each.mesh) == (kind != "plain") for each in outlines)
    with torch.no_grad():
        before = model(torch.zeros(1, dtype=torch.long))  # leaves an FSDP2 root whole for now
    plan = plan_for(layouts)
    compared: list[Compared] = []
    share, _ = publish(source, plan, rank, offload, compared)
    _require_agreement(plan, compared, num_ranks)
    if offload:
        locals_ = [parameter.to_local() for parameter in model.parameters()]
        assert {each.untyped_storage().nbytes() for each in locals_} == {0}
        source.onload()
    with torch.no_grad():
        assert torch.equal(model(torch.zeros(1, dtype=torch.long)), before)
    shares: list[Share] = [None] * num_ranks  # type: ignore[list-item]
    dist.all_gather_object(shares, share)
    return plan, shares


def _require_agreement(plan: Plan, compared: list[Compared], num_ranks: int) -> None:
    """Ranks that hold the same boxes agree. All of them hold `steps`, which is no DTensor."""
    assert bool(plan.replicas) == (num_ranks > 1)
    if compared:
        found: list[Compared] = [None] * num_ranks  # type: ignore[list-item]
        dist.all_gather_object(found, compared[0])
        assert not combine([each.agreement for each in found]).any()
        assert all(each.digests.all() for each in found), "each box was digested"
