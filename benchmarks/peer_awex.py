"""awex's core alone between trainer and engine ranks: plan, operations, one NCCL group.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peer_awex \\
        --part '{"trainers": 1, "engines": 1, "layers": 4, "cpu": false, "rounds": 7}'

To awex's advantage, the rest is left out: the rendezvous server, the conversion of names, and the process
group that awex makes and ends in each update.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_fleet import Destination, Model, own_device
from benchmarks.isolate import asked, emit, stage
from benchmarks.models import Tensor, model_of, rank_box
from benchmarks.rank_probe import synchronize
from benchmarks.spmd import Control
from benchmarks.updates import NUM_WARM, check, new_version, spread
from benchmarks.values import fill
from weightsync.plan import Box

__all__ = ["uneven"]


class Sender:
    """A trainer rank, with tensors cut along the first dimension."""

    def __init__(self, model: Model, rank: int, num_ranks: int) -> None:
        boxes = [(tensor, rank_box(replace(tensor, cut=0), rank, num_ranks)) for tensor in model]
        device = own_device()
        self._held = [
            (t, box, torch.empty(box.extent, dtype=torch.bfloat16, device=device)) for t, box in boxes
        ]

    def prepare(self, version: int) -> None:
        """Write `version` into every element."""
        fill(self._held, version)
        synchronize()

    def build(self, plan: Any) -> Callable[[], None]:  # noqa: ANN401 (awex's TransferPlan)
        """Build operations. Returns a function that runs them."""
        from awex.transfer.nccl_comm import batch_send_recv, nccl_build_send_ops

        parameters = {tensor.name: local for tensor, _, local in self._held}
        ops, _, _ = nccl_build_send_ops(parameters, plan, dist.group.WORLD, -1, True)
        return lambda: batch_send_recv(ops, [], blocking=True, use_group=True)

    def wrong(self, version: int) -> int:
        """Return 0, as a sender receives nothing."""
        return 0


class Receiver(Destination):
    """An engine rank."""

    def prepare(self, version: int) -> None:
        """Make every byte wrong."""
        self.poison()

    def build(self, plan: Any) -> Callable[[], None]:  # noqa: ANN401 (awex's TransferPlan)
        """Build like the sender. Parts that are not contiguous are received elsewhere and copied."""
        from awex.transfer.nccl_comm import batch_send_recv, nccl_build_recv_ops

        ops, apart, _ = nccl_build_recv_ops(self.live, plan, dist.group.WORLD, True)

        def run() -> None:
            batch_send_recv([], ops, blocking=True, use_group=True)
            for target, received in apart:
                target.copy_(received)

        return run


def main() -> None:
    """Plan once, time the rounds and print a row."""
    spec = asked()
    num_engines, num_trainers, rank = spec["engines"], spec["trainers"], int(os.environ["RANK"])
    model = model_of("tiny" if spec["cpu"] else "moe", 0, spec["layers"])
    stage(f"awex: {len(model)} tensors are made")
    if not spec["cpu"]:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if spec["cpu"] else "nccl")
    control = Control()
    _prepare(rank, num_engines + num_trainers)
    planned: list[Any] = []
    planned_s = control.seconds(lambda: planned.append(_plan(model, num_engines, num_trainers, rank)))
    mine: Sender | Receiver
    if rank < num_engines:  # awex expects engine ranks first
        mine = Receiver(model, rank, num_engines)
    else:
        mine = Sender(model, rank - num_engines, num_trainers)
    rounds = []
    for number in range(-NUM_WARM, spec["rounds"]):
        version = new_version()
        stage(f"awex: round {number + 1}")
        mine.prepare(version)
        taken = _update(mine, planned[0], control)
        check(control.total(mine.wrong(version)), "awex", version)
        rounds += [taken] if number >= 0 else []
    if rank == 0:
        row: dict[str, object] = {"plan ms": planned_s * 1e3, "GB": sum(t.nbytes for t in model) / 1e9}
        for name in ("total", "build", "run"):
            row |= spread(name, [taken[name] for taken in rounds])
        emit(row)
    dist.destroy_process_group()


def uneven(model: Model, num_trainers: int, num_engines: int) -> bool:
    """Return True if ranks hold unequal parts of a tensor."""
    cuts = [(tensor.shape[0], num_trainers) for tensor in model]
    cuts += [(tensor.shape[tensor.cut], num_engines) for tensor in model if tensor.cut is not None]
    return any(size % num_parts for size, num_parts in cuts)


def _update(mine: Sender | Receiver, plan: Any, control: Control) -> dict[str, float]:  # noqa: ANN401
    """Return the slowest rank's seconds in all, of building and of running."""
    built_s: list[float] = []

    def both() -> None:
        started = time.perf_counter()
        run = mine.build(plan)
        built_s.append(time.perf_counter() - started)
        run()
        synchronize()

    total = control.seconds(both)
    build = control.most(built_s[0])
    return {"total": total, "build": build, "run": total - build}


def _prepare(rank: int, num_ranks: int) -> None:
    _skip_package()
    if not torch.cuda.is_available():
        os.environ["AWEX_DEVICE_TYPE"] = "cpu"
        return
    from awex.util.process_group import setup_batch_isend_irecv

    setup_batch_isend_irecv(dist.group.WORLD, rank, num_ranks)


def _plan(model: Model, num_engines: int, num_trainers: int, rank: int) -> Any:  # noqa: ANN401 (awex's)
    from awex.transfer.transfer_plan import TransferPlanBuilder

    engines = [_meta(tensor, num_engines) for tensor in model]
    trainers = [_meta(replace(tensor, cut=0), num_trainers) for tensor in model]
    return TransferPlanBuilder(num_engines, num_trainers, 1).build_local_transfer_plan(
        engines, trainers, rank
    )


def _skip_package() -> None:
    """Skip awex's ``__init__``, which imports Megatron. The core does not need Megatron."""
    found = importlib.util.find_spec("awex")
    assert found is not None
    package = types.ModuleType("awex")
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules.setdefault("awex", package)


def _meta(tensor: Tensor, num_ranks: int) -> Any:  # noqa: ANN401 (awex's ParameterMeta)
    """Describe a tensor to awex: one sharded replica, or a replica per rank."""
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta

    boxes = [rank_box(tensor, rank, num_ranks) for rank in range(num_ranks)]
    shards = [_shard(tensor, rank, num_ranks, box) for rank, box in enumerate(boxes) if box.numel]
    replicas = [[shard] for shard in shards] if tensor.cut is None else [shards]
    return ParameterMeta(
        tensor.name,
        math.prod(tensor.shape),
        tensor.shape,
        torch.bfloat16,
        shards,
        [ParameterReplicaMeta(each) for each in replicas],
    )


def _shard(tensor: Tensor, rank: int, num_ranks: int, box: Box) -> Any:  # noqa: ANN401 (awex's)
    from awex.meta.weight_meta import ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    cut = tensor.cut is not None and num_ranks > 1
    return ParameterShardMeta(
        tp_rank=rank,
        attn_tp_rank=rank,
        pp_rank=0,
        ep_rank=0,
        ep_tp_rank=0,
        global_rank=rank,
        world_size=num_ranks,
        engine_rank=0,
        name=tensor.name,
        shape=box.extent,
        numel=box.numel,
        dtype=torch.bfloat16,
        global_offset=box.offset,
        sharding_type=ShardingType.TP_SHARDING if cut else ShardingType.NO_SHARDING,
        num_shards=num_ranks if cut else 1,
        sharding_dim=tensor.cut or 0,
    )


if __name__ == "__main__":
    main()
